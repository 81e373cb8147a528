# Training: the steps of a run, each in the run's folder.


rule distill:
    """Stage 1 of a run, attention transfer: results/<scale>/runs/<run>/distill."""
    input:
        parents("distill"),
    output:
        update("<results>/runs/{name}/distill/run.json"),
    log:
        "<results>/logs/{name}.distill.log",
    priority: 2  # the longest chains first: a chain that ends alone leaves all slots but one idle
    threads: cores("distill")
    resources:
        gpu=gpus("distill"),
        mem_mb=MEMORY,
        runtime=minutes("distill"),
    params:
        key=key("distill"),
    shell:
        "{RELINEAR} distill {wildcards.name:q} {OPTIONS} --threads {threads} --gpus {resources.gpu} 2>&1 | ({TEE} {log:q})"


rule finetune:
    """Stage 2 of a run, the linearized model trained on text: results/<scale>/runs/<run>/finetune."""
    input:
        parents("finetune"),
    output:
        update("<results>/runs/{name}/finetune/run.json"),
    log:
        "<results>/logs/{name}.finetune.log",
    threads: cores("finetune")
    resources:
        gpu=gpus("finetune"),
        mem_mb=MEMORY,
        runtime=minutes("finetune"),
    params:
        key=key("finetune"),
    shell:
        "{RELINEAR} finetune {wildcards.name:q} {OPTIONS} --threads {threads} --gpus {resources.gpu} 2>&1 | ({TEE} {log:q})"


rule classify:
    """An encoder and a head trained on a task."""
    input:
        parents("classify"),
    output:
        update("<results>/runs/{name}/classify/run.json"),
    log:
        "<results>/logs/{name}.classify.log",
    threads: cores("classify")
    resources:
        gpu=gpus("classify"),
        mem_mb=MEMORY,
        runtime=minutes("classify"),
    params:
        key=key("classify"),
    shell:
        "{RELINEAR} classify {wildcards.name:q} {OPTIONS} --threads {threads} --gpus {resources.gpu} 2>&1 | ({TEE} {log:q})"


rule pretrain:
    """All weights of a model trained from scratch."""
    input:
        parents("pretrain"),
    output:
        update("<results>/runs/{name}/pretrain/run.json"),
    log:
        "<results>/logs/{name}.pretrain.log",
    threads: cores("pretrain")
    resources:
        gpu=gpus("pretrain"),
        mem_mb=MEMORY,
        runtime=minutes("pretrain"),
    params:
        key=key("pretrain"),
    shell:
        "{RELINEAR} pretrain {wildcards.name:q} {OPTIONS} --threads {threads} --gpus {resources.gpu} 2>&1 | ({TEE} {log:q})"
