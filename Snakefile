# The contents page. `snakemake --list` prints every rule with its purpose; workflow/papers/README.md lists every table and figure.
from snakemake.utils import min_version

min_version("9.20")


include: "workflow/rules/common.smk"
include: "workflow/rules/nodes.smk"
include: "workflow/rules/benchmarks.smk"
include: "workflow/rules/artefacts.smk"
