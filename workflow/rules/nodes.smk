# One rule a stage, by its file in src/relinear/stages. A stage that runs behind a table is a node: one folder, made whole or not at all.
# assets -> models -> [written] -> texts and other data -> activations -> distill, finetune -> measure. Each is made once for all runs that read it.

# Downloads first: a machine without the network finds out before it trains. Then the longest chains, since a chain that ends alone leaves all slots
# but one idle: distill, and activations, for which it waits. Then measure: prompts and their tokens are made on the processor, while trainings have
# the GPU.
PRIORITY = {"asset": 3, "activations": 2, "distill": 2, "measure": 1}


# On a cluster it runs where the command was given, since many nodes have no network.
localrules:
    asset,


for stage in stages.available():
    if stage == "measure":
        continue

    rule:
        name:
            stage
        input:
            reads(stage),
        output:
            update(record_of(stage)),
        log:
            log_of(stage),
        priority: PRIORITY.get(stage, 0)
        threads: cores(stage)
        resources:
            gpu=plan.gpus(stage),
            mem_mb=MEMORY,
            runtime=minutes(stage),
        params:
            key=key(stage),
        shell:  # is put together when the job runs: `stage` would be the last one then
            "{RELINEAR} {rule} {wildcards.name:q} {OPTIONS} --threads {threads} --gpus {resources.gpu} 2>&1 | ({TEE} {log:q})"

    workflow.get_rule(stage).docstring = stages.stage(stage).help


# One metric of one run a node, so that a new metric reruns nothing.
rule measure:
    """One evaluation of a run, as workflow/measures.yaml names it: results/<scale>/runs/<run>/<measure>."""
    input:
        reads("measure"),
    output:
        update("<results>/runs/{name}/{measure}/run.json"),
        update("<results>/runs/{name}/{measure}/metrics.json"),
    log:
        "<results>/logs/{name}.{measure}.log",
    priority: PRIORITY["measure"]
    threads: cores("measure")
    resources:
        gpu=plan.gpus("measure"),
        mem_mb=MEMORY,
        runtime=minutes("measure"),
    params:
        key=key("measure"),
    shell:
        "{RELINEAR} measure {wildcards.name:q} {wildcards.measure:q} {OPTIONS} --threads {threads} --gpus {resources.gpu} 2>&1 | ({TEE} {log:q})"
