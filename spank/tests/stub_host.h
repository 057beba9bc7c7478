/* A host for the plugin without Slurm: records what the plugin does, and can refuse calls. */
#ifndef STUB_HOST_H
#define STUB_HOST_H

#include <stdbool.h>
#include <stdint.h>

#include <slurm/spank.h>

#define HOST_MAX_OPTIONS 64

struct host {
    enum spank_context context;
    struct spank_option options[HOST_MAX_OPTIONS];
    int option_count;
    char errors[8192];
    char control[4096]; /* NAME=VALUE\n ... */
    char task_env[4096];
    uint32_t job[4]; /* by spank_item_t */
    bool refuse_item;
    bool refuse_register;
    bool refuse_control;
};

extern struct host host;

void host_reset(enum spank_context context);
/* Also write errors to a file descriptor, for a child process that may end. */
void host_mirror_errors(int fd);
/* As Slurm does for one option on the command line; -1 where the option is unknown. */
int host_give(const char *name, const char *value, int remote);

#endif
