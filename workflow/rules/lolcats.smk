# LoLCATs: Low-rank Linearization of Large Language Models (ICML 2024 workshop version).

LOLCATS_CODE = code_hash(["relinear.draw.lolcats"])


rule lolcats_table1:
    """LoLCATs Table 1: feature maps with and without attention transfer."""
    input:
        records(
            *(
                plan.step(stage, run)
                for run in plan.rows("lolcats", "table1")
                for stage in ("fidelity", "evaluate")
                if stage == "evaluate" or plan.runs[run].method != "softmax"
            )
        ),
        "workflow/papers/lolcats.yaml",
    output:
        "<results>/lolcats/table1.csv",
        "<results>/lolcats/table1.md",
        "<results>/lolcats/table1.provenance.json",
        "<results>/lolcats/table1.claims.csv",
    log:
        "<results>/logs/lolcats.table1.log",
    params:
        code=LOLCATS_CODE,
    shell:
        "{RELINEAR} render lolcats table1 {OPTIONS} 2>&1 | ({TEE} {log})"


rule lolcats_figure2:
    """LoLCATs Figure 2: throughput and memory of generation against batch and length."""
    input:
        EFFICIENCY,
        "workflow/papers/lolcats.yaml",
    output:
        "results/lolcats/figure2.pdf",
        "results/lolcats/figure2.png",
        "results/lolcats/figure2.claims.csv",
        "results/lolcats/figure2.provenance.json",
    log:
        "results/logs/lolcats.figure2.log",
    params:
        code=LOLCATS_CODE,
    shell:
        "{RELINEAR} render lolcats figure2 {OPTIONS} 2>&1 | ({TEE} {log})"


rule lolcats_figure3:
    """LoLCATs Figure 3: attention weights of the exp feature map, with transfer."""
    input:
        shown("lolcats", "figure3"),
        "workflow/papers/lolcats.yaml",
    output:
        "<results>/lolcats/figure3.pdf",
        "<results>/lolcats/figure3.png",
        "<results>/lolcats/figure3.provenance.json",
    log:
        "<results>/logs/lolcats.figure3.log",
    params:
        code=LOLCATS_CODE,
    shell:
        "{RELINEAR} render lolcats figure3 {OPTIONS} 2>&1 | ({TEE} {log})"


rule lolcats_figure4:
    """LoLCATs Figure 4: attention weights of the exp feature map, without transfer."""
    input:
        shown("lolcats", "figure4"),
        "workflow/papers/lolcats.yaml",
    output:
        "<results>/lolcats/figure4.pdf",
        "<results>/lolcats/figure4.png",
        "<results>/lolcats/figure4.provenance.json",
    log:
        "<results>/logs/lolcats.figure4.log",
    params:
        code=LOLCATS_CODE,
    shell:
        "{RELINEAR} render lolcats figure4 {OPTIONS} 2>&1 | ({TEE} {log})"


rule lolcats_figure5:
    """LoLCATs Figure 5: attention weights of the ReLU feature map, with transfer."""
    input:
        shown("lolcats", "figure5"),
        "workflow/papers/lolcats.yaml",
    output:
        "<results>/lolcats/figure5.pdf",
        "<results>/lolcats/figure5.png",
        "<results>/lolcats/figure5.provenance.json",
    log:
        "<results>/logs/lolcats.figure5.log",
    params:
        code=LOLCATS_CODE,
    shell:
        "{RELINEAR} render lolcats figure5 {OPTIONS} 2>&1 | ({TEE} {log})"


rule lolcats_figure6:
    """LoLCATs Figure 6: attention weights of the ReLU feature map, without transfer."""
    input:
        shown("lolcats", "figure6"),
        "workflow/papers/lolcats.yaml",
    output:
        "<results>/lolcats/figure6.pdf",
        "<results>/lolcats/figure6.png",
        "<results>/lolcats/figure6.provenance.json",
    log:
        "<results>/logs/lolcats.figure6.log",
    params:
        code=LOLCATS_CODE,
    shell:
        "{RELINEAR} render lolcats figure6 {OPTIONS} 2>&1 | ({TEE} {log})"
