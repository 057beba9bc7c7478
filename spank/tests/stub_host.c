#include "stub_host.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

struct host host;
static int mirror = -1;

void host_mirror_errors(int fd)
{
    mirror = fd;
}

void host_reset(enum spank_context context)
{
    memset(&host, 0, sizeof(host));
    host.context = context;
}

int host_give(const char *name, const char *value, int remote)
{
    for (int i = 0; i < host.option_count; i++)
        if (strcmp(host.options[i].name, name) == 0)
            return host.options[i].cb(host.options[i].val, value, remote);
    return -1;
}

enum spank_context spank_context(void)
{
    return host.context;
}

spank_err_t spank_option_register(spank_t spank, struct spank_option *option)
{
    (void)spank;
    if (host.refuse_register || host.option_count == HOST_MAX_OPTIONS)
        return ESPANK_ERROR;
    host.options[host.option_count++] = *option;
    return ESPANK_SUCCESS;
}

static void append(char *list, size_t size, const char *name, const char *value)
{
    size_t used = strlen(list);
    snprintf(list + used, size - used, "%s=%s\n", name, value);
}

spank_err_t spank_get_item(spank_t spank, spank_item_t item, ...)
{
    (void)spank;
    if (host.refuse_item)
        return ESPANK_ERROR;
    va_list arguments;
    va_start(arguments, item);
    *va_arg(arguments, uint32_t *) = host.job[item];
    va_end(arguments);
    return ESPANK_SUCCESS;
}

spank_err_t spank_setenv(spank_t spank, const char *name, const char *value, int overwrite)
{
    (void)spank;
    (void)overwrite;
    append(host.task_env, sizeof(host.task_env), name, value);
    return ESPANK_SUCCESS;
}

spank_err_t spank_job_control_setenv(spank_t spank, const char *name, const char *value,
                                     int overwrite)
{
    (void)spank;
    (void)overwrite;
    if (host.refuse_control)
        return ESPANK_ERROR;
    append(host.control, sizeof(host.control), name, value);
    return ESPANK_SUCCESS;
}

static void log_line(const char *format, va_list arguments)
{
    size_t used = strlen(host.errors);
    vsnprintf(host.errors + used, sizeof(host.errors) - used, format, arguments);
    used = strlen(host.errors);
    snprintf(host.errors + used, sizeof(host.errors) - used, "\n");
    if (mirror >= 0)
        dprintf(mirror, "%s", host.errors);
}

void slurm_error(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    log_line(format, arguments);
    va_end(arguments);
}

void slurm_debug(const char *format, ...)
{
    (void)format;
}
