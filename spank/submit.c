/*
 * See submit.h.
 *
 * How the directive travels: SPANK's job control environment is the one part of a submission that
 * job_submit.lua can read whatever --export says. It carries one variable in the grammar of
 * --comment='ft: ...', so that Lua has a single parser for both ways in. Options as such would
 * arrive there too, but without the environment twins and unchecked.
 */
#include "submit.h"

#include <inttypes.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "directive.h"

/* site/lua/slurm_ext.lua reads it. (Prolog and epilog would see it with SPANK_ in front.) */
#define CONTROL_VARIABLE "SLURM_EXT_DIRECTIVE"
/* wrappers/slurm_ft/variables.py: SLURM_JOB */
#define JOB_VARIABLE "FT_SLURM_JOB"
/* SLURM_BATCH_SCRIPT of <slurm/slurm.h> */
#define BATCH_STEP 0xfffffffbu
/* NO_VAL there */
#define NO_TASK 0xfffffffeu
#define REFUSE (-1)

static struct ft_directive directive;

/* srun inside a job starts a step: there is no submission to describe. */
static bool is_step(void)
{
    return spank_context() == S_CTX_LOCAL && getenv("SLURM_JOB_ID") != NULL;
}

/* Called for SLURM_SPANK_* variables, then #SBATCH lines, then the command line: the last value
 * wins, so taking a value twice must be harmless. */
static int take_option(int index, const char *text, int remote)
{
    char message[FT_MESSAGE_BYTES];

    if (ft_directive_set(&directive, index, text, time(NULL), message))
        return 0;
    if (remote) {
        /* Checked at submission already. Here a failure could only hurt the node. */
        slurm_debug("slurm-ext: ignored: %s", message);
        return 0;
    }
    slurm_error("%s", message);
    return REFUSE;
}

static int ignore_option(int index, const char *text, int remote)
{
    (void)index;
    (void)text;
    (void)remote;
    return 0;
}

int ft_register_options(spank_t spank, bool passive)
{
    for (int i = 0; i < FT_OPTION_COUNT; i++) {
        /* The struct has plain char pointers; Slurm copies the strings and never writes them. */
        struct spank_option option = {
            .name = (char *)(uintptr_t)ft_options[i].spank,
            .arginfo = (char *)(uintptr_t)ft_options[i].metavar,
            .usage = (char *)(uintptr_t)ft_options[i].usage,
            .has_arg = 1,
            .val = i,
            .cb = passive ? ignore_option : take_option,
        };
        if (spank_option_register(spank, &option) != ESPANK_SUCCESS) {
            slurm_error("slurm-ext: option --%s could not be registered", ft_options[i].spank);
            return REFUSE;
        }
    }
    return 0;
}

/*
 * Stop the submission after its reason was told. Slurm listens to init_post_opt only where
 * plugstack.conf says "required", and there a missing plugin file would break every node. So the
 * command ends here, as it would by itself: nothing has been sent yet and nobody else's state is
 * in this process.
 */
static _Noreturn void refuse_submission(void)
{
    exit(EXIT_FAILURE);
}

void ft_submit_finish(spank_t spank)
{
    char message[FT_MESSAGE_BYTES], json[FT_MAX_DIRECTIVE_BYTES + 1], comment[FT_COMMENT_BYTES];

    if (is_step())
        return;
    /* Of the job in which sbatch runs: Slurm sets it where the new one has been restarted, and
     * leaves it where it has not (seen on 24.11). */
    unsetenv("SLURM_RESTART_COUNT");
    if (!ft_directive_fill(&directive, getenv, time(NULL), message) ||
        !ft_directive_json(&directive, json, sizeof(json), message)) {
        slurm_error("%s", message);
        refuse_submission();
    }
    if (ft_directive_empty(&directive))
        return;
    if (!ft_directive_comment(&directive, comment, sizeof(comment)) ||
        spank_job_control_setenv(spank, CONTROL_VARIABLE, comment, 1) != ESPANK_SUCCESS) {
        slurm_error("slurm-ext: the directive could not be handed to slurmctld; ask the "
                    "administrator, or submit without --ft-* options");
        refuse_submission();
    }
    /* The commands copy their own environment into the job (unless --export says otherwise). */
    for (int i = 0; i < FT_OPTION_COUNT; i++)
        if (directive.given[i])
            setenv(ft_options[i].job_env, directive.value[i], 1);
}

/*
 * Which job this is, for ft-run: "ID [ARRAY_TASK]". A job that is submitted from inside a task of an
 * array inherits SLURM_ARRAY_* of that task (seen on 24.11), and would requeue it instead of itself.
 * The variables themselves stay: scripts may rely on them.
 *
 * Told to the batch script, which hands it on to its steps: in a step Slurm takes the array's ids
 * from those very variables (seen on 24.11).
 */
static void tell_job(spank_t spank)
{
    uint32_t id, step, array, task;
    char text[64];

    if (spank_get_item(spank, S_JOB_ID, &id) != ESPANK_SUCCESS ||
        spank_get_item(spank, S_JOB_STEPID, &step) != ESPANK_SUCCESS ||
        spank_get_item(spank, S_JOB_ARRAY_ID, &array) != ESPANK_SUCCESS ||
        spank_get_item(spank, S_JOB_ARRAY_TASK_ID, &task) != ESPANK_SUCCESS) {
        slurm_debug("slurm-ext: Slurm does not tell the job's ids; ft-run goes by SLURM_*");
        return;
    }
    if (step != BATCH_STEP)
        return;
    if (array == 0 || task == NO_TASK)
        snprintf(text, sizeof(text), "%" PRIu32, id);
    else
        snprintf(text, sizeof(text), "%" PRIu32 " %" PRIu32 "_%" PRIu32, id, array, task);
    spank_setenv(spank, JOB_VARIABLE, text, 1);
}

void ft_step_environment(spank_t spank)
{
    tell_job(spank);
    for (int i = 0; i < FT_OPTION_COUNT; i++) {
        /* "now+..." was resolved at submission; resolving it again here would move it. */
        if (!directive.given[i] || ft_options[i].grammar == FT_G_DEADLINE)
            continue;
        spank_setenv(spank, ft_options[i].job_env, directive.value[i], 0);
    }
}

void ft_reset(void)
{
    memset(&directive, 0, sizeof(directive));
}
