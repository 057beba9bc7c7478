/* The plugin's moments against the stub host. Prints one line per check that fails. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "directive.h"
#include "stub_host.h"

int slurm_spank_init(spank_t spank, int ac, char *av[]);
int slurm_spank_init_post_opt(spank_t spank, int ac, char *av[]);
int slurm_spank_user_init(spank_t spank, int ac, char *av[]);
int slurm_spank_exit(spank_t spank, int ac, char *av[]);

static int checks, failures;
static char *passive[] = {"passive"};

#define CHECK(condition)                                                        \
    do {                                                                        \
        checks++;                                                               \
        if (!(condition)) {                                                     \
            failures++;                                                         \
            printf("%s:%d: %s: " #condition "\n", __FILE__, __LINE__, __func__); \
            printf("  errors: %s  control: %s  task: %s\n", host.errors, host.control, \
                   host.task_env);                                              \
        }                                                                       \
    } while (0)

static void start(enum spank_context context)
{
    for (int i = 0; i < FT_OPTION_COUNT; i++) {
        unsetenv(ft_options[i].twin);
        unsetenv(ft_options[i].job_env);
    }
    unsetenv("SLURM_JOB_ID");
    host_reset(context);
    CHECK(slurm_spank_init(NULL, 0, NULL) == 0);
}

static const char *env(const char *name)
{
    const char *value = getenv(name);
    return value ? value : "(unset)";
}

/* Whether the submission was stopped; the child's message comes back in host.errors. */
static bool stops_submission(void)
{
    int ends[2], status = 0;
    if (pipe(ends) != 0)
        abort();
    pid_t child = fork();
    if (child == 0) {
        close(ends[0]);
        host_mirror_errors(ends[1]);
        slurm_spank_init_post_opt(NULL, 0, NULL);
        _exit(0); /* went on: the job would be submitted */
    }
    close(ends[1]);
    size_t used = 0;
    ssize_t n;
    while ((n = read(ends[0], host.errors + used, sizeof(host.errors) - 1 - used)) > 0)
        used += (size_t)n;
    host.errors[used] = '\0';
    close(ends[0]);
    waitpid(child, &status, 0);
    return WIFEXITED(status) && WEXITSTATUS(status) == EXIT_FAILURE;
}

static void registers_in_every_context(void)
{
    for (enum spank_context c = S_CTX_LOCAL; c <= S_CTX_JOB_SCRIPT; c++) {
        start(c);
        CHECK(host.option_count == FT_OPTION_COUNT);
        for (int i = 0; i < host.option_count; i++) {
            CHECK(host.options[i].has_arg == 1 && host.options[i].cb != NULL);
            CHECK(strncmp(host.options[i].name, "ft-", 3) == 0);
        }
    }
}

static void hands_over_what_was_given(void)
{
    start(S_CTX_ALLOCATOR);
    CHECK(host_give("ft-model", "vit-large@main", 0) == 0);
    CHECK(host_give("ft-gpus", "8,1,2", 0) == 0);
    CHECK(host_give("ft-epochs", "3.50", 0) == 0);
    CHECK(host_give("ft-max-pause", "90", 0) == 0);
    CHECK(slurm_spank_init_post_opt(NULL, 0, NULL) == 0);
    CHECK(strcmp(host.control, "SLURM_EXT_DIRECTIVE=model=vit-large@main epochs=3.5 gpus=1-2,8 "
                               "max-pause=01:30:00\n") == 0);
    CHECK(strcmp(env("FT_GPUS"), "1-2,8") == 0);
    CHECK(strcmp(env("FT_MODEL"), "vit-large@main") == 0);
    CHECK(strcmp(env("FT_BATCH"), "(unset)") == 0);
    CHECK(host.errors[0] == '\0');
}

static void nothing_given_means_nothing_done(void)
{
    start(S_CTX_ALLOCATOR);
    CHECK(slurm_spank_init_post_opt(NULL, 0, NULL) == 0);
    CHECK(host.control[0] == '\0' && host.errors[0] == '\0');
}

static void refuses_with_option_value_and_fix(void)
{
    start(S_CTX_ALLOCATOR);
    CHECK(host_give("ft-epochs", "three", 0) < 0);
    CHECK(strstr(host.errors, "--ft-epochs=three: not a decimal number; write a number above 0"));
    start(S_CTX_LOCAL);
    CHECK(host_give("ft-gpus", "4-2", 0) < 0);
    CHECK(strstr(host.errors, "--ft-gpus=4-2: the range runs backwards; write requested, auto"));
    start(S_CTX_ALLOCATOR);
    CHECK(host_give("ft-model", "a\x1b[31m", 0) < 0);
    CHECK(strchr(host.errors, '\x1b') == NULL);
    CHECK(host_give("ft-model", NULL, 0) < 0);
}

static void last_value_wins(void)
{
    start(S_CTX_ALLOCATOR);
    CHECK(host_give("ft-samples", "5", 0) == 0);
    CHECK(host_give("ft-samples", "7", 0) == 0);
    CHECK(slurm_spank_init_post_opt(NULL, 0, NULL) == 0);
    CHECK(strcmp(host.control, "SLURM_EXT_DIRECTIVE=samples=7\n") == 0);
}

static void epochs_and_steps_exclude_each_other(void)
{
    start(S_CTX_ALLOCATOR);
    CHECK(host_give("ft-epochs", "3", 0) == 0);
    CHECK(host_give("ft-steps", "10", 0) < 0);
    CHECK(strstr(host.errors, "--ft-steps=10: --ft-epochs=3 is also given"));
    start(S_CTX_ALLOCATOR);
    CHECK(host_give("ft-steps", "10", 0) == 0);
    CHECK(host_give("ft-epochs", "3", 0) < 0);
}

static void twins_fill_only_what_is_absent(void)
{
    start(S_CTX_ALLOCATOR);
    setenv("SLURM_FT_MODEL", "other", 1);
    setenv("SLURM_FT_SAMPLES", "100", 1);
    setenv("SLURM_FT_STEPS", "9", 1);
    CHECK(host_give("ft-model", "mine", 0) == 0);
    CHECK(host_give("ft-epochs", "2", 0) == 0);
    CHECK(slurm_spank_init_post_opt(NULL, 0, NULL) == 0);
    CHECK(strcmp(host.control, "SLURM_EXT_DIRECTIVE=model=mine samples=100 epochs=2\n") == 0);

    start(S_CTX_ALLOCATOR);
    setenv("SLURM_FT_SAMPLES", "lots", 1);
    CHECK(stops_submission());
    CHECK(strstr(host.errors, "environment variable SLURM_FT_SAMPLES: --ft-samples=lots: "));
    CHECK(host.control[0] == '\0');
}

static void a_step_is_no_submission(void)
{
    start(S_CTX_LOCAL);
    setenv("SLURM_JOB_ID", "12", 1);
    setenv("SLURM_FT_SAMPLES", "lots", 1);
    CHECK(slurm_spank_init_post_opt(NULL, 0, NULL) == 0);
    CHECK(host.control[0] == '\0' && host.errors[0] == '\0');
    /* sbatch inside a job is one */
    start(S_CTX_ALLOCATOR);
    setenv("SLURM_JOB_ID", "12", 1);
    setenv("SLURM_FT_SAMPLES", "100", 1);
    CHECK(slurm_spank_init_post_opt(NULL, 0, NULL) == 0);
    CHECK(strcmp(host.control, "SLURM_EXT_DIRECTIVE=samples=100\n") == 0);
}

static void nothing_fails_on_a_compute_node(void)
{
    start(S_CTX_REMOTE);
    for (int i = 0; i < FT_OPTION_COUNT; i++)
        CHECK(host_give(ft_options[i].spank, "\xff nonsense", 1) == 0);
    CHECK(slurm_spank_init_post_opt(NULL, 0, NULL) == 0);
    CHECK(slurm_spank_user_init(NULL, 0, NULL) == 0);
    CHECK(host.task_env[0] == '\0' && host.errors[0] == '\0');
    CHECK(slurm_spank_exit(NULL, 0, NULL) == 0);

    host_reset(S_CTX_REMOTE);
    host.refuse_register = true;
    CHECK(slurm_spank_init(NULL, 0, NULL) == 0);
    host_reset(S_CTX_SLURMD);
    host.refuse_register = true;
    CHECK(slurm_spank_init(NULL, 0, NULL) == 0);
}

static void a_step_sees_the_values(void)
{
    start(S_CTX_REMOTE);
    CHECK(host_give("ft-gpus", "4,2", 1) == 0);
    CHECK(host_give("ft-deadline", "now+1:00:00", 1) == 0);
    CHECK(slurm_spank_user_init(NULL, 0, NULL) == 0);
    CHECK(strcmp(host.task_env, "FT_GPUS=2,4\n") == 0);
}

static void of_job(uint32_t id, uint32_t step, uint32_t array, uint32_t task)
{
    start(S_CTX_REMOTE);
    host.job[S_JOB_ID] = id;
    host.job[S_JOB_STEPID] = step;
    host.job[S_JOB_ARRAY_ID] = array;
    host.job[S_JOB_ARRAY_TASK_ID] = task;
}

static void a_task_sees_which_job_it_is_of(void)
{
    const uint32_t batch = 0xfffffffb, none = 0xfffffffe;

    of_job(1235, batch, 0, none);
    CHECK(slurm_spank_user_init(NULL, 0, NULL) == 0);
    CHECK(strcmp(host.task_env, "FT_SLURM_JOB=1235\n") == 0);

    of_job(1235, batch, 1234, none);
    CHECK(slurm_spank_user_init(NULL, 0, NULL) == 0);
    CHECK(strcmp(host.task_env, "FT_SLURM_JOB=1235\n") == 0);

    of_job(1235, batch, 1234, 7);
    CHECK(slurm_spank_user_init(NULL, 0, NULL) == 0);
    CHECK(strcmp(host.task_env, "FT_SLURM_JOB=1235 1234_7\n") == 0);

    /* A step hands on what the batch script got: Slurm knows less here. */
    of_job(1235, 0, 1229, 3);
    CHECK(slurm_spank_user_init(NULL, 0, NULL) == 0);
    CHECK(host.task_env[0] == '\0');

    start(S_CTX_REMOTE);
    host.refuse_item = true;
    CHECK(slurm_spank_user_init(NULL, 0, NULL) == 0);
    CHECK(host.task_env[0] == '\0' && host.errors[0] == '\0');
}

static void a_new_job_has_not_been_restarted(void)
{
    start(S_CTX_ALLOCATOR);
    setenv("SLURM_RESTART_COUNT", "3", 1);
    setenv("SLURM_JOB_ID", "1230", 1);
    CHECK(slurm_spank_init_post_opt(NULL, 0, NULL) == 0);
    CHECK(getenv("SLURM_RESTART_COUNT") == NULL);

    start(S_CTX_LOCAL); /* srun inside a job: a step of that very job */
    setenv("SLURM_RESTART_COUNT", "3", 1);
    setenv("SLURM_JOB_ID", "1230", 1);
    CHECK(slurm_spank_init_post_opt(NULL, 0, NULL) == 0);
    CHECK(strcmp(getenv("SLURM_RESTART_COUNT"), "3") == 0);
    unsetenv("SLURM_RESTART_COUNT");
}

static void passive_accepts_and_ignores(void)
{
    start(S_CTX_ALLOCATOR);
    host_reset(S_CTX_ALLOCATOR);
    CHECK(slurm_spank_init(NULL, 1, passive) == 0);
    CHECK(host.option_count == FT_OPTION_COUNT);
    CHECK(host_give("ft-epochs", "three", 0) == 0);
    CHECK(host_give("ft-steps", "10", 0) == 0);
    setenv("SLURM_FT_SAMPLES", "lots", 1);
    CHECK(slurm_spank_init_post_opt(NULL, 1, passive) == 0);
    CHECK(slurm_spank_user_init(NULL, 1, passive) == 0);
    CHECK(host.control[0] == '\0' && host.task_env[0] == '\0' && host.errors[0] == '\0');
}

static void unknown_argument_is_named(void)
{
    static char *wrong[] = {"pasive"};
    host_reset(S_CTX_ALLOCATOR);
    CHECK(slurm_spank_init(NULL, 1, wrong) == 0);
    CHECK(strstr(host.errors, "\"pasive\" is unknown"));
}

static void failure_to_hand_over_is_told(void)
{
    start(S_CTX_ALLOCATOR);
    host.refuse_control = true;
    CHECK(host_give("ft-samples", "5", 0) == 0);
    CHECK(stops_submission());
    CHECK(strstr(host.errors, "could not be handed to slurmctld"));
}

static void the_longest_directive_is_refused(void)
{
    char model[200], path[300], gpus[200] = "1";
    memset(model, 'm', sizeof(model));
    model[96] = '@';
    model[97 + 64] = '\0';
    memset(path, 'p', sizeof(path));
    path[255] = '\0';
    for (int i = 1; i < FT_MAX_GPU_RANGES; i++)
        snprintf(gpus + strlen(gpus), sizeof(gpus) - strlen(gpus), ",%d-%d", i * 100 + 1000,
                 i * 100 + 1001);
    start(S_CTX_ALLOCATOR);
    CHECK(host_give("ft-model", model, 0) == 0);
    CHECK(host_give("ft-dataset", path, 0) == 0);
    CHECK(host_give("ft-gpus", gpus, 0) == 0);
    CHECK(slurm_spank_init_post_opt(NULL, 0, NULL) == 0);

    /* The limit itself, with a buffer that is too small for the same directive. */
    static struct ft_directive directive;
    char small[64], message[FT_MESSAGE_BYTES];
    CHECK(ft_directive_set(&directive, ft_option_index("model"), model, 0, message));
    CHECK(!ft_directive_json(&directive, small, sizeof(small), message));
    CHECK(strstr(message, "more than 1024 bytes"));
    CHECK(!ft_directive_comment(&directive, small, sizeof(small)));
}

int main(void)
{
    registers_in_every_context();
    hands_over_what_was_given();
    nothing_given_means_nothing_done();
    refuses_with_option_value_and_fix();
    last_value_wins();
    epochs_and_steps_exclude_each_other();
    twins_fill_only_what_is_absent();
    a_step_is_no_submission();
    nothing_fails_on_a_compute_node();
    a_step_sees_the_values();
    a_task_sees_which_job_it_is_of();
    a_new_job_has_not_been_restarted();
    passive_accepts_and_ignores();
    unknown_argument_is_named();
    failure_to_hand_over_is_told();
    the_longest_directive_is_refused();
    printf("%d checks, %d failed\n", checks, failures);
    return failures ? 1 : 0;
}
