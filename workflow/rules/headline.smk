# The headline table: five methods on one teacher, beside what their papers print.

HEADLINE = [
    run for row in plan.rows("headline", "table2") for run in (row, *plan.repeats(row))
]


rule table2:
    """The headline table of the scale."""
    input:
        records(*(plan.step("evaluate", run) for run in HEADLINE)),
        "workflow/papers/headline.yaml",
    output:
        "<results>/table2.csv",
        "<results>/table2.md",
        "<results>/table2.provenance.json",
        "<results>/claims.csv",
    log:
        "<results>/logs/table2.log",
    params:
        rows=HEADLINE,
        code=code_hash(["relinear.draw.headline"]),
    shell:
        "{RELINEAR} render headline table2 {OPTIONS} 2>&1 | ({TEE} {log})"


rule headline:
    """results/table2.csv: the headline table of the chosen scale, where the README looks for it."""
    input:
        "<results>/table2.csv",
        "<results>/table2.md",
        "<results>/table2.provenance.json",
        "<results>/claims.csv",
    output:
        "results/table2.csv",
        "results/table2.md",
        "results/table2.provenance.json",
        "results/claims.csv",
    log:
        "results/logs/headline.log",
    params:
        scale=plan.scale,
    shell:
        "cp {input} results/ 2>&1 | ({TEE} {log})"
