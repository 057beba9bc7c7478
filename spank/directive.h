/*
 * The set of options that one submission gave, checked and canonical.
 *
 * Pure like grammar.h. Checks between options are made when the second one arrives, not at the
 * end: Slurm lets a plugin's option callback refuse a submission always, its init_post_opt only
 * where plugstack.conf says "required".
 */
#ifndef FT_DIRECTIVE_H
#define FT_DIRECTIVE_H

#include <stdbool.h>
#include <stddef.h>
#include <time.h>

#include "grammar.h"

#define FT_MESSAGE_BYTES 1024
/* Room for every option as "name=value " (the longest values together stay below this). */
#define FT_COMMENT_BYTES 2048

struct ft_directive {
    char value[FT_OPTION_COUNT][FT_MAX_VALUE + 1];
    bool given[FT_OPTION_COUNT];
    bool filled[FT_OPTION_COUNT]; /* from the environment, not by the user's command */
};

/* Index of the option, or -1. Takes the bare name. */
int ft_option_index(const char *name);

/* Take one value, given last wins. On failure returns false, leaves the directive as it was and
 * writes option, value, reason and fix into `message`. */
bool ft_directive_set(struct ft_directive *directive, int option, const char *text, time_t now,
                      char message[FT_MESSAGE_BYTES]);

/* Take the environment twins of what is absent and not excluded by what is given. */
bool ft_directive_fill(struct ft_directive *directive, char *(*environment)(const char *),
                       time_t now, char message[FT_MESSAGE_BYTES]);

bool ft_directive_empty(const struct ft_directive *directive);

/* "name=value name=value", the grammar of --comment='ft: ...'. False where it does not fit. */
bool ft_directive_comment(const struct ft_directive *directive, char *out, size_t size);

/* The JSON document without what Lua adds (shape). False, with a message, past the limit. */
bool ft_directive_json(const struct ft_directive *directive, char *out, size_t size,
                       char message[FT_MESSAGE_BYTES]);

#endif
