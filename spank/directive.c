/* See directive.h. */
#include "directive.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#define SHOWN_BYTES 80 /* of a bad value in a message */

int ft_option_index(const char *name)
{
    for (int i = 0; i < FT_OPTION_COUNT; i++)
        if (strcmp(ft_options[i].name, name) == 0)
            return i;
    return -1;
}

/* A bad value, made safe for one line of a terminal. */
static void show(const char *text, char out[SHOWN_BYTES + 4])
{
    size_t n = 0;
    for (; text && text[n] != '\0' && n < SHOWN_BYTES; n++)
        out[n] = (text[n] >= ' ' && text[n] <= '~') ? text[n] : '?';
    memcpy(out + n, text && text[n] != '\0' ? "..." : "", text && text[n] != '\0' ? 4 : 1);
}

bool ft_directive_set(struct ft_directive *directive, int index, const char *text, time_t now,
                      char message[FT_MESSAGE_BYTES])
{
    const struct ft_option *option = &ft_options[index];
    char canonical[FT_MAX_VALUE + 1] = "";
    char shown[SHOWN_BYTES + 4];
    const char *reason = ft_canonical(option, text, now, canonical);

    show(text, shown);
    if (reason) {
        snprintf(message, FT_MESSAGE_BYTES, "--%s=%s: %s; %s", option->spank, shown, reason,
                 option->fix);
        return false;
    }
    int other = option->excludes[0] ? ft_option_index(option->excludes) : -1;
    if (other >= 0 && directive->given[other]) {
        snprintf(message, FT_MESSAGE_BYTES, "--%s=%s: --%s=%s is also given; give only one of them",
                 option->spank, shown, ft_options[other].spank, directive->value[other]);
        return false;
    }
    memcpy(directive->value[index], canonical, sizeof(canonical));
    directive->given[index] = true;
    return true;
}

bool ft_directive_fill(struct ft_directive *directive, char *(*environment)(const char *),
                       time_t now, char message[FT_MESSAGE_BYTES])
{
    for (int i = 0; i < FT_OPTION_COUNT; i++) {
        const struct ft_option *option = &ft_options[i];
        int other = option->excludes[0] ? ft_option_index(option->excludes) : -1;
        const char *text = environment(option->twin);
        char why[FT_MESSAGE_BYTES];

        if (text == NULL || directive->given[i] || (other >= 0 && directive->given[other]))
            continue;
        if (!ft_directive_set(directive, i, text, now, why)) {
            int n = snprintf(message, FT_MESSAGE_BYTES, "environment variable %s: ", option->twin);
            snprintf(message + n, FT_MESSAGE_BYTES - (size_t)n, "%s", why);
            return false;
        }
        directive->filled[i] = true;
    }
    return true;
}

bool ft_directive_empty(const struct ft_directive *directive)
{
    for (int i = 0; i < FT_OPTION_COUNT; i++)
        if (directive->given[i])
            return false;
    return true;
}

struct writer {
    char *out;
    size_t size;
    size_t used;
    bool full;
};

__attribute__((format(printf, 2, 3))) static void put(struct writer *writer, const char *format,
                                                      ...)
{
    va_list arguments;
    size_t room = writer->size - writer->used;
    va_start(arguments, format);
    int n = vsnprintf(writer->out + writer->used, room, format, arguments);
    va_end(arguments);
    if (n < 0 || (size_t)n >= room)
        writer->full = true;
    else
        writer->used += (size_t)n;
}

bool ft_directive_comment(const struct ft_directive *directive, char *out, size_t size)
{
    struct writer writer = {.out = out, .size = size};
    out[0] = '\0';
    for (int i = 0; i < FT_OPTION_COUNT; i++)
        if (directive->given[i])
            put(&writer, "%s%s=%s", writer.used ? " " : "", ft_options[i].name,
                directive->value[i]);
    return !writer.full;
}

/* No value holds a quote, a backslash or a control character: the grammars forbid them. */
static void put_json(struct writer *writer, const struct ft_option *option, const char *value)
{
    const char *key = option->keys[0];
    const char *mark;

    switch (option->grammar) {
    case FT_G_MODEL:
        mark = strchr(value, '@');
        if (mark)
            put(writer, ",\"%s\":\"%.*s\",\"%s\":\"%s\"", key, (int)(mark - value), value,
                option->keys[1], mark + 1);
        else
            put(writer, ",\"%s\":\"%s\"", key, value);
        break;
    case FT_G_BATCH:
        mark = strchr(value, '-');
        put(writer, ",\"%s\":%.*s,\"%s\":%s", key, (int)strcspn(value, "-"), value,
            option->keys[1], mark ? mark + 1 : value);
        break;
    case FT_G_COUNT:
    case FT_G_DECIMAL:
        put(writer, ",\"%s\":%s", key, value);
        break;
    case FT_G_SWITCH:
        put(writer, ",\"%s\":%s", key, strcmp(value, "yes") == 0 ? "true" : "false");
        break;
    case FT_G_DEADLINE:
        put(writer, ",\"%s\":%lld", key, ft_deadline_epoch(value));
        break;
    case FT_G_TIME:
        put(writer, ",\"%s\":%lld", key, ft_time_seconds(value));
        break;
    case FT_G_QUALITY:
        mark = strpbrk(value, "<>");
        put(writer, ",\"%s\":[\"%.*s\",\"%c=\",%s]", key, (int)(mark - value), value, mark[0],
            mark + 2);
        break;
    case FT_G_PATH:
    case FT_G_GPUS:
    case FT_G_SHAPE:
    case FT_G_LAYERS:
    case FT_G_CHOICE:
        put(writer, ",\"%s\":\"%s\"", key, value);
        break;
    }
}

bool ft_directive_json(const struct ft_directive *directive, char *out, size_t size,
                       char message[FT_MESSAGE_BYTES])
{
    struct writer writer = {.out = out, .size = size};
    put(&writer, "{\"v\":1");
    for (int i = 0; i < FT_OPTION_COUNT; i++)
        if (directive->given[i] && strcmp(directive->value[i], ft_options[i].fallback) != 0)
            put_json(&writer, &ft_options[i], directive->value[i]);
    put(&writer, "}");
    if (writer.full || writer.used > FT_MAX_DIRECTIVE_BYTES) {
        snprintf(message, FT_MESSAGE_BYTES,
                 "--ft-*: the directive takes more than %d bytes; shorten the dataset path, the "
                 "model name or the GPU list",
                 FT_MAX_DIRECTIVE_BYTES);
        return false;
    }
    return true;
}
