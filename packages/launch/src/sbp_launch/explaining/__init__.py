"""Reports of a plan for people: tables, timelines, pages, comparisons and explanations.

    table, report, pipeline_lines, savings, cluster_lines    the printed plan; output prints it
    plan_timeline, timelines, draw                           the simulated step as a picture
    plan_page, page_model, page_charts, plan_figures         the plan as one HTML file, and as JSON
    compare, reasons, question, alternatives                 answers to `explain=` and `compare=`

Nothing here runs a plan. Only `alternatives` makes plans of its own.
"""
