# Inputs: assets -> models -> [written] -> texts -> activations. Each is made once for all runs of a scale that read it.


# On a cluster it runs where the command was given, since many nodes have no network.
localrules:
    asset,


rule asset:
    """A model, a text or evaluation items, obtained and verified."""
    output:
        update("<results>/assets/{name}/run.json"),
    log:
        "<results>/logs/asset.{name}.log",
    params:
        key=key("asset"),
    shell:
        "{RELINEAR} asset {wildcards.name:q} {OPTIONS} 2>&1 | ({TEE} {log:q})"


rule model:
    """A model that runs begin with, saved once as a plain transformers folder."""
    input:
        assets("model"),
    output:
        update("<results>/models/{name}/run.json"),
    log:
        "<results>/logs/model.{name}.log",
    threads: cores("model")
    resources:
        mem_mb=MEMORY,
        runtime=minutes("model"),
    params:
        key=key("model"),
    shell:
        "{RELINEAR} model {wildcards.name:q} {OPTIONS} --threads {threads} 2>&1 | ({TEE} {log:q})"


rule written:
    """Instructions and answers that a model writes itself, for data sets that train on them."""
    input:
        parents("written"),
    output:
        update("<results>/written/{name}/run.json"),
    log:
        "<results>/logs/written.{name}.log",
    threads: cores("written")
    resources:
        gpu=gpus("written"),
        mem_mb=MEMORY,
        runtime=minutes("written"),
    params:
        key=key("written"),
    shell:
        "{RELINEAR} written {wildcards.name:q} {OPTIONS} --threads {threads} 2>&1 | ({TEE} {log:q})"


rule text:
    """The texts of a data set as token streams: one to train on, one held out."""
    input:
        parents("text"),
        assets("text"),
    output:
        update("<results>/text/{name}/run.json"),
    log:
        "<results>/logs/text.{name}.log",
    resources:
        mem_mb=MEMORY,
        runtime=minutes("text"),
    params:
        key=key("text"),
    shell:
        "{RELINEAR} text {wildcards.name:q} {OPTIONS} --threads {threads} 2>&1 | ({TEE} {log:q})"


rule sentences:
    """Short texts and pairs of them, each a sequence of its own, as encoders read them."""
    input:
        parents("sentences"),
        assets("sentences"),
    output:
        update("<results>/sentences/{name}/run.json"),
    log:
        "<results>/logs/sentences.{name}.log",
    resources:
        mem_mb=MEMORY,
        runtime=minutes("sentences"),
    params:
        key=key("sentences"),
    shell:
        "{RELINEAR} sentences {wildcards.name:q} {OPTIONS} --threads {threads} 2>&1 | ({TEE} {log:q})"


rule labelled:
    """Short texts and pairs of them with a label each."""
    input:
        parents("labelled"),
        assets("labelled"),
    output:
        update("<results>/labelled/{name}/run.json"),
    log:
        "<results>/logs/labelled.{name}.log",
    resources:
        mem_mb=MEMORY,
        runtime=minutes("labelled"),
    params:
        key=key("labelled"),
    shell:
        "{RELINEAR} labelled {wildcards.name:q} {OPTIONS} --threads {threads} 2>&1 | ({TEE} {log:q})"


rule documents:
    """Whole documents as tokens, to measure on."""
    input:
        parents("documents"),
        assets("documents"),
    output:
        update("<results>/documents/{name}/run.json"),
    log:
        "<results>/logs/documents.{name}.log",
    resources:
        mem_mb=MEMORY,
        runtime=minutes("documents"),
    params:
        key=key("documents"),
    shell:
        "{RELINEAR} documents {wildcards.name:q} {OPTIONS} --threads {threads} 2>&1 | ({TEE} {log:q})"


rule activations:
    """A model's pass over the transfer data, shared by all runs that distill."""
    input:
        parents("activations"),
    output:
        update("<results>/activations/{name}/run.json"),
    log:
        "<results>/logs/activations.{name}.log",
    priority: 2  # as distill, which waits for it
    threads: cores("activations")
    resources:
        gpu=gpus("activations"),
        mem_mb=MEMORY,
        runtime=minutes("activations"),
    params:
        key=key("activations"),
    shell:
        "{RELINEAR} activations {wildcards.name:q} {OPTIONS} --threads {threads} 2>&1 | ({TEE} {log:q})"


rule recall:
    """Sequences of associative recall."""
    output:
        update("<results>/recall/{name}/run.json"),
    log:
        "<results>/logs/recall.{name}.log",
    resources:
        mem_mb=MEMORY,
        runtime=minutes("recall"),
    params:
        key=key("recall"),
    shell:
        "{RELINEAR} recall {wildcards.name:q} {OPTIONS} --threads {threads} 2>&1 | ({TEE} {log:q})"


rule arena:
    """Long sequences and their classes."""
    input:
        assets("arena"),
    output:
        update("<results>/arena/{name}/run.json"),
    log:
        "<results>/logs/arena.{name}.log",
    resources:
        mem_mb=MEMORY,
        runtime=minutes("arena"),
    params:
        key=key("arena"),
    shell:
        "{RELINEAR} arena {wildcards.name:q} {OPTIONS} --threads {threads} 2>&1 | ({TEE} {log:q})"


rule images:
    """Pictures of one size, each with its class."""
    input:
        assets("images"),
    output:
        update("<results>/images/{name}/run.json"),
    log:
        "<results>/logs/images.{name}.log",
    resources:
        mem_mb=MEMORY,
        runtime=minutes("images"),
    params:
        key=key("images"),
    shell:
        "{RELINEAR} images {wildcards.name:q} {OPTIONS} --threads {threads} 2>&1 | ({TEE} {log:q})"


rule passkeys:
    """Long texts that hide pass keys and end in a question for one of them, and its answer, to train on."""
    input:
        parents("passkeys"),
    output:
        update("<results>/passkeys/{name}/run.json"),
    log:
        "<results>/logs/passkeys.{name}.log",
    resources:
        mem_mb=MEMORY,
        runtime=minutes("passkeys"),
    params:
        key=key("passkeys"),
    shell:
        "{RELINEAR} passkeys {wildcards.name:q} {OPTIONS} --threads {threads} 2>&1 | ({TEE} {log:q})"


rule pieces:
    """Long documents cut into sequences of one length, to train on."""
    input:
        parents("pieces"),
        assets("pieces"),
    output:
        update("<results>/pieces/{name}/run.json"),
    log:
        "<results>/logs/pieces.{name}.log",
    resources:
        mem_mb=MEMORY,
        runtime=minutes("pieces"),
    params:
        key=key("pieces"),
    shell:
        "{RELINEAR} pieces {wildcards.name:q} {OPTIONS} --threads {threads} 2>&1 | ({TEE} {log:q})"


rule splits:
    """A text with splits of its own, as token streams."""
    input:
        parents("splits"),
        assets("splits"),
    output:
        update("<results>/splits/{name}/run.json"),
    log:
        "<results>/logs/splits.{name}.log",
    resources:
        mem_mb=MEMORY,
        runtime=minutes("splits"),
    params:
        key=key("splits"),
    shell:
        "{RELINEAR} splits {wildcards.name:q} {OPTIONS} --threads {threads} 2>&1 | ({TEE} {log:q})"


rule prompts:
    """Prompts and their answers, as token streams, and those that are held out."""
    input:
        parents("prompts"),
        assets("prompts"),
    output:
        update("<results>/prompts/{name}/run.json"),
    log:
        "<results>/logs/prompts.{name}.log",
    resources:
        mem_mb=MEMORY,
        runtime=minutes("prompts"),
    params:
        key=key("prompts"),
    shell:
        "{RELINEAR} prompts {wildcards.name:q} {OPTIONS} --threads {threads} 2>&1 | ({TEE} {log:q})"
