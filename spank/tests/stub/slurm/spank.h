/*
 * The part of Slurm's plugin interface that this plugin uses, declared anew for the stub host.
 * The unit tests must build where Slurm's headers are not installed; the plugin itself is always
 * built against the real <slurm/spank.h>, so a wrong declaration here fails there.
 */
#ifndef STUB_SPANK_H
#define STUB_SPANK_H

#define ESPANK_SUCCESS 0
#define ESPANK_ERROR 3000

typedef struct spank_handle *spank_t;
typedef int spank_err_t;
typedef int (*spank_opt_cb_f)(int val, const char *optarg, int remote);

enum spank_context {
    S_CTX_ERROR,
    S_CTX_LOCAL,
    S_CTX_REMOTE,
    S_CTX_ALLOCATOR,
    S_CTX_SLURMD,
    S_CTX_JOB_SCRIPT
};

typedef enum spank_item {
    S_JOB_ID,
    S_JOB_STEPID,
    S_JOB_ARRAY_ID,
    S_JOB_ARRAY_TASK_ID
} spank_item_t;

struct spank_option {
    char *name;
    char *arginfo;
    char *usage;
    int has_arg;
    int val;
    spank_opt_cb_f cb;
};

#define SPANK_PLUGIN(the_name, the_version)           \
    extern const char plugin_name[], plugin_type[];   \
    const char plugin_name[] = #the_name;             \
    const char plugin_type[] = "spank"

enum spank_context spank_context(void);
spank_err_t spank_option_register(spank_t spank, struct spank_option *option);
spank_err_t spank_get_item(spank_t spank, spank_item_t item, ...);
spank_err_t spank_setenv(spank_t spank, const char *name, const char *value, int overwrite);
spank_err_t spank_job_control_setenv(spank_t spank, const char *name, const char *value,
                                     int overwrite);
void slurm_error(const char *format, ...) __attribute__((format(printf, 1, 2)));
void slurm_debug(const char *format, ...) __attribute__((format(printf, 1, 2)));

#endif
