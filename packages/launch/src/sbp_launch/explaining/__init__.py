"""Reports of a plan for people: tables, timelines, pages, comparisons and explanations.

    table, report, pipeline_lines, savings, cluster_lines    the printed plan
    output                                                   prints it, and writes it into a folder
    plan_timeline, timelines, draw                           the simulated step as a picture
    plan_page, page_model, page_charts                       the plan as one HTML file
    plan_figures                                             predicted costs, also as JSON
    compare, reasons                                         two plans side by side; why they differ
    question, alternatives                                   answers to `explain=` and `compare=`

Nothing here runs a plan. Only `alternatives` makes plans of its own.
"""
