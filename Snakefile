# The contents page. `snakemake --list` prints every rule with what it makes; the README says how to call it.
from snakemake.utils import min_version

min_version("9.20")


include: "workflow/rules/common.smk"
include: "workflow/rules/stages.smk"
include: "workflow/rules/headline.smk"
include: "workflow/rules/lolcats.smk"
include: "workflow/rules/lizard.smk"
include: "workflow/rules/supra.smk"
