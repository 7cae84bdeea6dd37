"""What people see of a plan: tables, lines, timelines and pages, and why the plan is as it is.

    table, report, pipeline_lines, savings, cluster_lines    the printed plan
    output                                                   prints it, and writes it into a folder
    plan_timeline, timelines, draw                           the simulated step as a picture
    plan_page, page_model, page_charts                       the plan as one HTML file
    compare, reasons                                         two plans side by side, and why
    question, alternatives                                   answers to `explain=` and `compare=`

Nothing here plans or runs anything, except that `alternatives` plans the alternatives.
"""
