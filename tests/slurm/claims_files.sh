# shellcheck shell=bash
# Claims about the templates as files.

# shellcheck source=tests/slurm/jobs.sh
. tests/slurm/jobs.sh

every_template_is_clean_and_accepted() {
    local file site nodes gpus options
    shellcheck -x slurm/*.sbatch
    expect_equal "$(comm -23 <(cd slurm && printf '%s\n' *.sbatch | sort) <(slurm/submit --jobs | sed 's/$/.sbatch/' | sort))" "" \
        "templates without a job"
    for file in slurm/*.sbatch; do
        template_faults "$file"
        sbatch --test-only "$file"
        for site in "${SITES[@]:0:2}"; do
            read -r _ nodes gpus <<<"$site"
            mapfile -t options < <(SITE_NODES=$nodes SITE_GPUS_PER_NODE=$gpus slurm/submit --options "$(basename "$file" .sbatch)")
            sbatch --test-only "${options[@]}" "$file"
        done
    done
}

lines_that_sbatch_ignores_are_found() {
    local file=$work/faulty.sbatch
    printf '#!/bin/bash\ntrue\n#SBATCH --nodes=1\n' >"$file"
    expect_equal "$(template_faults "$file" || true)" "$file:3: an #SBATCH line after the first command is ignored" faults
    # shellcheck disable=SC2016 # the fault itself
    printf '#!/bin/bash\n#SBATCH --nodes=$NODES\n' >"$file"
    expect_equal "$(template_faults "$file" || true)" "$file:2: variables are not expanded in an #SBATCH line" faults
    printf '#SBATCH --nodes=1\n' >"$file"
    expect_equal "$(template_faults "$file" || true)" "$file: no #! line" faults
}
