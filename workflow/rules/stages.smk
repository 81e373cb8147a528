# assets -> teacher -> [instructions] -> corpus -> activations, once a scale; distill -> finetune -> evaluate and fidelity, once a run.


# On a cluster these stay where the command was given: the one has the network, which the nodes of many lack, the others take seconds.
localrules:
    tracking_store,
    assets,
    headline,


rule tracking_store:
    """The MLflow store, made before anything writes to it in parallel."""
    output:
        touch("results/.tracking"),
    log:
        "results/logs/tracking.log",
    shell:
        "{RELINEAR} track init {OPTIONS} 2>&1 | ({TEE} {log})"


rule assets:
    """Models, texts and evaluation items of the scale, obtained and verified."""
    input:
        ancient("results/.tracking"),
    output:
        "<results>/assets/run.json",
    log:
        "<results>/logs/assets.log",
    params:
        key=key("assets"),
    shell:
        "{RELINEAR} assets {OPTIONS} 2>&1 | ({TEE} {log})"


rule teacher:
    """The teacher, saved once as a plain transformers folder."""
    input:
        ancient("<results>/assets/run.json"),
    output:
        "<results>/teacher/run.json",
    log:
        "<results>/logs/teacher.log",
    threads: cores
    resources:
        mem_mb=MEMORY,
        runtime=MINUTES["teacher"],
    params:
        key=key("teacher"),
    shell:
        "{RELINEAR} teacher {OPTIONS} --threads {threads} 2>&1 | ({TEE} {log})"


rule instructions:
    """Instructions and answers that the teacher writes itself, where the scale trains on them."""
    input:
        "<results>/teacher/run.json",
    output:
        "<results>/instructions/run.json",
    log:
        "<results>/logs/instructions.log",
    threads: cores
    resources:
        gpu=gpus,
        mem_mb=MEMORY,
        runtime=MINUTES["instructions"],
    params:
        key=key("instructions"),
    shell:
        "{RELINEAR} instructions {OPTIONS} --threads {threads} 2>&1 | ({TEE} {log})"


rule corpus:
    """The texts as token streams: one to train on, one held out."""
    input:
        parents("corpus"),
    output:
        "<results>/corpus/run.json",
    log:
        "<results>/logs/corpus.log",
    resources:
        mem_mb=MEMORY,
        runtime=MINUTES["corpus"],
    params:
        key=key("corpus"),
    shell:
        "{RELINEAR} corpus {OPTIONS} --threads {threads} 2>&1 | ({TEE} {log})"


rule activations:
    """The teacher's pass over the transfer data, shared by all runs that distill."""
    input:
        "<results>/teacher/run.json",
        "<results>/corpus/run.json",
    output:
        "<results>/activations/run.json",
    log:
        "<results>/logs/activations.log",
    priority: 2  # as distill, which waits for it
    threads: cores
    resources:
        gpu=gpus,
        mem_mb=MEMORY,
        runtime=MINUTES["activations"],
    params:
        key=key("activations"),
    shell:
        "{RELINEAR} activations {OPTIONS} --threads {threads} 2>&1 | ({TEE} {log})"


rule distill:
    """Stage 1: attention transfer."""
    input:
        parents("distill"),
    output:
        "<results>/runs/{run}/distill/run.json",
    log:
        "<results>/logs/{run}.distill.log",
    priority: 2  # longest chains first: what ends alone keeps all slots but one idle
    threads: spread_cores
    resources:
        gpu=spread_gpus,
        mem_mb=MEMORY,
        runtime=MINUTES["distill"],
    params:
        key=key("distill"),
    shell:
        "{RELINEAR} distill {wildcards.run} {OPTIONS} --threads {threads} --gpus {resources.gpu} 2>&1 | ({TEE} {log})"


rule finetune:
    """Stage 2: the linearized model trained on text."""
    input:
        parents("finetune"),
    output:
        "<results>/runs/{run}/finetune/run.json",
    log:
        "<results>/logs/{run}.finetune.log",
    threads: spread_cores
    resources:
        gpu=spread_gpus,
        mem_mb=MEMORY,
        runtime=MINUTES["finetune"],
    params:
        key=key("finetune"),
    shell:
        "{RELINEAR} finetune {wildcards.run} {OPTIONS} --threads {threads} --gpus {resources.gpu} 2>&1 | ({TEE} {log})"


rule fidelity:
    """A method against softmax attention, before finetuning."""
    input:
        parents("fidelity"),
    output:
        "<results>/runs/{run}/fidelity/run.json",
        "<results>/runs/{run}/fidelity/metrics.json",
    log:
        "<results>/logs/{run}.fidelity.log",
    threads: cores
    resources:
        gpu=gpus,
        mem_mb=MEMORY,
        runtime=MINUTES["fidelity"],
    params:
        key=key("fidelity"),
    shell:
        "{RELINEAR} fidelity {wildcards.run} {OPTIONS} --threads {threads} 2>&1 | ({TEE} {log})"


rule evaluate:
    """The gate, perplexity and lm-eval's tasks."""
    input:
        parents("evaluate"),
        ancient("<results>/assets/run.json"),
    output:
        "<results>/runs/{run}/evaluate/run.json",
        "<results>/runs/{run}/evaluate/metrics.json",
    log:
        "<results>/logs/{run}.evaluate.log",
    priority: 1  # prompts and their tokens are made on the processor, while trainings have the GPU
    threads: spread_cores
    resources:
        gpu=spread_gpus,
        mem_mb=MEMORY,
        runtime=MINUTES["evaluate"],
    params:
        key=key("evaluate"),
    shell:
        "{RELINEAR} evaluate {wildcards.run} {OPTIONS} --threads {threads} --gpus {resources.gpu} 2>&1 | ({TEE} {log})"


# Scale-free: it is of random weights at the papers' own shapes. An interrupted measurement goes on with the rows it has.
rule benchmark:
    """The cost of generating at 7-8B shapes: throughput and memory, on one GPU of 40 GB or more."""
    output:
        "results/efficiency/efficiency.csv",
        "results/efficiency/efficiency.provenance.json",
    log:
        "results/logs/benchmark.log",
    resources:
        gpu=1,
        mem_mb=32000,
        runtime=60,
    params:
        code=code_hash(
            ["relinear.benchmarks.generation"]
            + [
                f"relinear.attention.{name}"
                for name in ("hedgehog", "lizard", "lolcats", "supra")
            ]
        ),
    shell:
        "{RELINEAR} benchmark 2>&1 | ({TEE} {log})"
