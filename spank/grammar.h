/*
 * Value grammars of the --ft-* options: text in, canonical text out, or a reason.
 *
 * Pure: no Slurm header, no environment but the time zone, no allocation. The twin of
 * slurm_ext/domain/grammar.py and site/lua/ft_grammar.lua; a property test holds the three to the
 * same answers.
 */
#ifndef FT_GRAMMAR_H
#define FT_GRAMMAR_H

#include <stddef.h>
#include <time.h>

#include "ft_options.h"

#define FT_MAX_VALUE 512 /* no value is longer, canonical or not */

/* Canonical text of `text` into `out` (FT_MAX_VALUE + 1 bytes). NULL, or the reason for refusing;
 * the reason is a static string. */
const char *ft_canonical(const struct ft_option *option, const char *text, time_t now, char *out);

/* Seconds of a canonical TIME, seconds since the epoch of a canonical deadline. */
long long ft_time_seconds(const char *canonical);
long long ft_deadline_epoch(const char *canonical);

#endif
