# Tables and figures: one rule each, by its spec workflow/papers/<paper>/<stem>.yaml. `snakemake lolcats_figure3` makes one,
# `snakemake lolcats` a whole paper.


localrules:
    check,
    table2,


for artefact in plan.artefacts.values():

    rule:
        name:
            artefact.name
        input:
            sorted({artefact.path, artefact.rows_path}),
            measurements(artefact),
            plan.files(artefact),
            lambda wildcards, artefact=artefact: guarded(plan.drawing(artefact)),
        output:
            shown(artefact),
        log:
            f"<results>/logs/{artefact.name}.log",
        params:
            rows=lambda wildcards, artefact=artefact: [
                str(n) for n in plan.reads(artefact).values()
            ],
            beside=lambda wildcards, artefact=artefact: artefact.beside,
            code=lambda wildcards, artefact=artefact: plan.drawn_by(artefact),
            options=f"{artefact.paper} {artefact.stem} {plan.as_options()}",
        shell:
            "{RELINEAR} draw {params.options} --finished 2>&1 | ({TEE} {log:q})"

    workflow.get_rule(artefact.name).docstring = (
        f"{artefact.spec.label}: {artefact.spec.says}."
    )


for paper in dict.fromkeys(artefact.paper for artefact in plan.artefacts.values()):

    rule:
        name:
            paper
        input:
            [outputs(a) for a in plan.artefacts.values() if a.paper == paper],

    workflow.get_rule(paper).docstring = f"All tables and figures of {paper}."


# A run's steps are `distill` and `finetune` (rules/nodes.smk); these two go on from them, for all runs of a scale.
rule evaluate:
    """All evaluations: every measurement that a table or figure shows. The rule `measure` takes one of them, of one run."""
    input:
        [measurements(artefact) for artefact in plan.artefacts.values()],


rule plot:
    """All plots: every table and figure of every paper. A rule each, such as `lolcats_figure3`, makes one of them."""
    input:
        lambda wildcards: [path for a in plan.artefacts.values() for path in outputs(a)],


rule check:
    """Checks every run, measurement, table and figure of a scale, in seconds. Other targets check what stands behind them."""
    log:
        "<results>/logs/check.log",
    params:
        options=plan.as_options(),
    shell:
        "{PYTHON} relinear.cli check {params.options} 2>&1 | ({TEE} {log:q})"


rule table2:
    """results/table2.csv: the headline table of the chosen scale, where the README looks for it."""
    input:
        outputs(plan.artefacts["comparison_table2"]),
        lambda wildcards: guarded(
            drawing(Path("results"), "table2"),
            plan.drawing(plan.artefacts["comparison_table2"]),
        ),
    output:
        "results/table2.csv",
        "results/table2.md",
        "results/table2.claims.csv",
        "results/table2.provenance.json",
        drawing(Path("results"), "table2").as_posix(),
    log:
        "results/logs/table2.log",
    shell:
        "cp {input:q} results/ 2>&1 | ({TEE} {log:q})"


# What stands behind a target is checked. For a target that no rule makes, names near it are printed, or the choices that it lacks. Snakemake knows its targets only after this file.
if workflow.is_main_process and "snakemake" in Path(sys.argv[0]).as_posix():
    with redirect_stderr(StringIO()):  # Snakemake has named the profile already
        asked = parse_args(sys.argv[1:])[1].targets or ()
    for target in asked:
        if said := explain_target(target, [rule.name for rule in workflow.rules], plan):
            raise WorkflowError(said)
        try:
            check_target(target, plan)
        except UserError as error:
            raise WorkflowError(str(error)) from None

gc.freeze()
gc.enable()
