/* See grammar.h. One function per grammar, a small reader of whole numbers below them. */
#include "grammar.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_REVISION 64
#define MAX_METRIC 48
#define MAX_TIME_DIGITS 9 /* keeps every product below far inside a long long */
#define MINUTE_S 60LL
#define HOUR_S 3600LL
#define DAY_S 86400LL
#define TEN_YEARS_S (10LL * 365 * DAY_S)
#define FIRST_S 946684800LL /* 2000-01-01 in UTC */
#define END_S 7258118400LL  /* 2200-01-01 in UTC */

static const char LETTERS[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ";
static const char DIGITS[] = "0123456789";

/* The ctype functions depend on the locale; these do not. */
static bool is_digit(char c)
{
    return c >= '0' && c <= '9';
}

static bool is_letter(char c)
{
    return c != '\0' && strchr(LETTERS, c) != NULL;
}

/* Length of the run at `text` made of letters, digits and the characters in `more`. */
static size_t word_length(const char *text, const char *more)
{
    size_t n = 0;
    while (is_letter(text[n]) || is_digit(text[n]) || (text[n] != '\0' && strchr(more, text[n])))
        n++;
    return n;
}

/* A whole number in [1, high] at the start of `text` of exactly `length` characters. */
static const char *read_count(const char *text, size_t length, long long high, long long *value)
{
    if (length == 0 || text[0] == '0' || strspn(text, DIGITS) < length)
        return "not a whole number above 0";
    if (length > 18)
        return "out of range";
    long long number = 0;
    for (size_t i = 0; i < length; i++)
        number = number * 10 + (text[i] - '0');
    if (number > high)
        return "out of range";
    *value = number;
    return NULL;
}

/* "N" or "N-M" of exactly `length` characters. */
static const char *read_range(const char *text, size_t length, long long high, long long *low,
                              long long *top)
{
    const char *dash = memchr(text, '-', length);
    size_t first = dash ? (size_t)(dash - text) : length;
    const char *reason = read_count(text, first, high, low);
    if (reason)
        return reason;
    *top = *low;
    if (dash)
        reason = read_count(dash + 1, length - first - 1, high, top);
    if (reason == NULL && *top < *low)
        reason = "the range runs backwards";
    return reason;
}

/* Unsigned decimal with at most `max_fraction` digits after the point, trailing zeros dropped.
 * On success `*used` is how much of `text` it took. */
static const char *read_decimal(const char *text, size_t max_fraction, long long high, char *out,
                                size_t *used, bool *zero)
{
    size_t whole = strspn(text, DIGITS);
    size_t fraction = 0;
    if (whole == 0 || (text[0] == '0' && whole > 1))
        return "not a decimal number";
    *used = whole;
    if (text[whole] == '.') {
        fraction = strspn(text + whole + 1, DIGITS);
        if (fraction == 0 || fraction > max_fraction)
            return "not a decimal number";
        *used = whole + 1 + fraction;
    }
    while (fraction > 0 && text[whole + fraction] == '0')
        fraction--;
    if (whole > 18)
        return "too large";
    long long number = strtoll(text, NULL, 10);
    if (number + (fraction > 0) > high)
        return "too large";
    *zero = number == 0 && fraction == 0;
    size_t length = fraction ? whole + 1 + fraction : whole;
    memcpy(out, text, length);
    out[length] = '\0';
    return NULL;
}

static const char *parse_model(const struct ft_option *option, const char *text, char *out)
{
    size_t name = word_length(text, "._/+:-");
    size_t revision = 0;
    if (name == 0 || !(is_letter(text[0]) || is_digit(text[0])))
        return "not a model name";
    if (text[name] == '@') {
        const char *start = text + name + 1;
        revision = word_length(start, "._/+-");
        if (revision == 0 || !(is_letter(start[0]) || is_digit(start[0])) ||
            start[revision] != '\0')
            return "not a model name";
    } else if (text[name] != '\0') {
        return "not a model name";
    }
    if (name > (size_t)option->high || revision > MAX_REVISION)
        return "the name or the revision is too long";
    strcpy(out, text);
    return NULL;
}

static const char *parse_path(const struct ft_option *option, const char *text, char *out)
{
    if (strlen(text) > (size_t)option->high)
        return "the path is too long";
    if (text[0] == '~' || text[0] == '-' || text[word_length(text, "._/+:@%,=#~-")] != '\0')
        return "a character that is not allowed in the path";
    strcpy(out, text);
    return NULL;
}

static const char *parse_count(const struct ft_option *option, const char *text, char *out)
{
    long long value = 0;
    const char *reason = read_count(text, strlen(text), option->high, &value);
    if (reason == NULL)
        snprintf(out, FT_MAX_VALUE + 1, "%lld", value);
    return reason;
}

static const char *parse_decimal(const struct ft_option *option, const char *text, char *out)
{
    size_t used = 0;
    bool zero = false;
    const char *reason = read_decimal(text, 4, option->high, out, &used, &zero);
    if (reason)
        return reason;
    if (text[used] != '\0')
        return "not a decimal number";
    return zero ? "not above 0" : NULL;
}

static const char *parse_batch(const struct ft_option *option, const char *text, char *out)
{
    long long low = 0, top = 0;
    const char *reason = read_range(text, strlen(text), option->high, &low, &top);
    if (reason)
        return reason;
    if (top > low)
        snprintf(out, FT_MAX_VALUE + 1, "%lld-%lld", low, top);
    else
        snprintf(out, FT_MAX_VALUE + 1, "%lld", low);
    return NULL;
}

struct span {
    long long low;
    long long top;
};

static int compare_spans(const void *a, const void *b)
{
    const struct span *left = a, *right = b;
    if (left->low != right->low)
        return left->low < right->low ? -1 : 1;
    return (left->top > right->top) - (left->top < right->top);
}

static const char *parse_gpus(const struct ft_option *option, const char *text, char *out)
{
    struct span spans[FT_MAX_VALUE / 2 + 1]; /* an item and its comma take two characters */
    size_t count = 0, joined = 0;

    if (strcmp(text, "requested") == 0 || strcmp(text, "auto") == 0) {
        strcpy(out, text);
        return NULL;
    }
    for (const char *item = text;; item++) {
        size_t length = strcspn(item, ",");
        const char *reason =
            read_range(item, length, option->high, &spans[count].low, &spans[count].top);
        if (reason)
            return reason;
        count++;
        item += length;
        if (*item == '\0')
            break;
    }
    qsort(spans, count, sizeof(spans[0]), compare_spans);
    for (size_t i = 1; i < count; i++) {
        if (spans[i].low > spans[joined].top + 1)
            spans[++joined] = spans[i];
        else if (spans[i].top > spans[joined].top)
            spans[joined].top = spans[i].top;
    }
    joined++;
    if (joined > FT_MAX_GPU_RANGES)
        return "too many separate ranges";
    size_t at = 0;
    for (size_t i = 0; i < joined; i++) {
        const char *comma = i ? "," : "";
        size_t room = FT_MAX_VALUE + 1 - at;
        int n = spans[i].top > spans[i].low
                    ? snprintf(out + at, room, "%s%lld-%lld", comma, spans[i].low, spans[i].top)
                    : snprintf(out + at, room, "%s%lld", comma, spans[i].low);
        at += (size_t)n;
    }
    return NULL;
}

static const char *parse_shape(const struct ft_option *option, const char *text, char *out)
{
    int sides = 0;
    for (const char *side = text;; side++) {
        size_t length = strcspn(side, "x");
        long long value;
        const char *reason = read_count(side, length, option->high, &value);
        if (reason)
            return reason;
        if (++sides > 4)
            return "more than four numbers";
        side += length;
        if (*side == '\0')
            break;
    }
    strcpy(out, text); /* no leading zeros: the text is canonical already */
    return NULL;
}

static bool is_choice(const struct ft_option *option, const char *text)
{
    for (int i = 0; i < FT_MAX_CHOICES && option->choices[i]; i++)
        if (strcmp(option->choices[i], text) == 0)
            return true;
    return false;
}

static const char *parse_choice(const struct ft_option *option, const char *text, char *out)
{
    if (!is_choice(option, text))
        return "not one of the choices";
    strcpy(out, text);
    return NULL;
}

static const char *parse_layers(const struct ft_option *option, const char *text, char *out)
{
    return is_choice(option, text) ? parse_choice(option, text, out)
                                   : parse_count(option, text, out);
}

static const char *parse_quality(const struct ft_option *option, const char *text, char *out)
{
    size_t metric = word_length(text, "_./@-");
    const char *bound = text + metric;
    size_t used = 0;
    bool zero = false;
    char digits[32]; /* 18 digits, a point, 6 digits */

    if (!is_letter(text[0]) || (bound[0] != '>' && bound[0] != '<') || bound[1] != '=')
        return "not a metric with a bound";
    bool minus = bound[2] == '-';
    const char *number = bound + 2 + minus;
    const char *reason = read_decimal(number, 6, option->high, digits, &used, &zero);
    if (reason)
        return reason;
    if (number[used] != '\0')
        return "not a metric with a bound";
    if (metric > MAX_METRIC)
        return "the name of the metric is too long";
    snprintf(out, FT_MAX_VALUE + 1, "%.*s%c=%s%s", (int)metric, text, bound[0],
             minus && !zero ? "-" : "", digits);
    return NULL;
}

/* Fields of digits parted by colons, at most `max`; NULL unless all of `text` is that. */
static const char *read_fields(const char *text, int max, long long *fields, int *count)
{
    for (*count = 0; *count < max;) {
        size_t length = strspn(text, DIGITS);
        if (length == 0)
            return "not a time";
        if (length > MAX_TIME_DIGITS)
            return "the time is too long";
        fields[(*count)++] = strtoll(text, NULL, 10);
        text += length;
        if (*text == '\0')
            return NULL;
        if (*text != ':')
            return "not a time";
        text++;
    }
    return "not a time";
}

/* Slurm's grammar: a bare number is minutes. */
static const char *read_walltime(const char *text, long long *seconds)
{
    long long days = 0, f[3] = {0, 0, 0};
    int count = 0;
    const char *reason;
    const char *dash = strchr(text, '-');

    if (dash) {
        size_t length = strspn(text, DIGITS);
        if (length == 0 || text + length != dash)
            return "not a time";
        if (length > MAX_TIME_DIGITS)
            return "the time is too long";
        days = strtoll(text, NULL, 10);
        if ((reason = read_fields(dash + 1, 3, f, &count)))
            return reason;
        if (f[0] > 23)
            return "the hours after days go from 0 to 23";
        if (f[1] > 59 || f[2] > 59)
            return "minutes and seconds below a larger unit go from 0 to 59";
        *seconds = days * DAY_S + f[0] * HOUR_S + f[1] * MINUTE_S + f[2];
        return NULL;
    }
    if ((reason = read_fields(text, 3, f, &count)))
        return reason;
    if ((count == 3 && (f[1] > 59 || f[2] > 59)) || (count == 2 && f[1] > 59))
        return "minutes and seconds below a larger unit go from 0 to 59";
    *seconds = count == 3 ? f[0] * HOUR_S + f[1] * MINUTE_S + f[2] : f[0] * MINUTE_S + f[1];
    return NULL;
}

static const char *parse_time(const struct ft_option *option, const char *text, char *out)
{
    long long s = 0;
    const char *reason = read_walltime(text, &s);
    if (reason)
        return reason;
    if (s < option->low || s > option->high)
        return "out of range";
    long long days = s / DAY_S, rest = s % DAY_S;
    size_t at = 0;
    if (days)
        at = (size_t)snprintf(out, FT_MAX_VALUE + 1, "%lld-", days);
    snprintf(out + at, FT_MAX_VALUE + 1 - at, "%02lld:%02lld:%02lld", rest / HOUR_S,
             rest % HOUR_S / MINUTE_S, rest % MINUTE_S);
    return NULL;
}

static const char *read_relative(const char *text, long long *seconds)
{
    static const struct {
        const char *word;
        long long unit_s;
    } units[] = {
        {"minute", MINUTE_S}, {"hour", HOUR_S}, {"day", DAY_S}, {"week", 7 * DAY_S},
    };
    size_t digits = strspn(text, DIGITS);

    if (digits >= 1 && digits <= 6 && text[0] != '0') {
        for (size_t i = 0; i < sizeof(units) / sizeof(units[0]); i++) {
            size_t length = strlen(units[i].word);
            const char *rest = text + digits + length;
            if (strncmp(text + digits, units[i].word, length) != 0)
                continue;
            if (strcmp(rest, "") == 0 || strcmp(rest, "s") == 0) {
                *seconds = strtoll(text, NULL, 10) * units[i].unit_s;
                return *seconds > TEN_YEARS_S ? "more than ten years ahead" : NULL;
            }
        }
    }
    if (strpbrk(text, ":-") == NULL)
        return "a number without a unit is ambiguous";
    const char *reason = read_walltime(text, seconds);
    if (reason)
        return reason;
    return *seconds > TEN_YEARS_S ? "more than ten years ahead" : NULL;
}

/* `width` digits at `*text`, then (if `then` is not 0) that character; advances. */
static bool take_digits(const char **text, int width, char then, int *value)
{
    *value = 0;
    for (int i = 0; i < width; i++) {
        if (!is_digit((*text)[i]))
            return false;
        *value = *value * 10 + ((*text)[i] - '0');
    }
    *text += width;
    if (then == '\0')
        return true;
    if (**text != then)
        return false;
    (*text)++;
    return true;
}

static bool is_leap(int year)
{
    return (year % 4 == 0 && year % 100 != 0) || year % 400 == 0;
}

/* Days from 1970-01-01, without timegm, which is no part of POSIX. */
static long long days_from_epoch(int year, int month, int day)
{
    static const int before[] = {0, 31, 59, 90, 120, 151, 181, 212, 243, 273, 304, 334};
    long long y = year - 1;
    long long days = y * 365 + y / 4 - y / 100 + y / 400 - 719162;
    return days + before[month - 1] + (month > 2 && is_leap(year)) + day - 1;
}

static const char *read_absolute(const char *text, long long *epoch)
{
    static const int month_days[] = {31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31};
    static const char form[] = "not a date and time";
    int year, month, day, hour = 0, minute = 0, second = 0, off_hour = 0, off_minute = 0;
    char zone = '\0';

    if (!take_digits(&text, 4, '-', &year) || !take_digits(&text, 2, '-', &month) ||
        !take_digits(&text, 2, '\0', &day))
        return form;
    if (*text == 'T') {
        text++;
        if (!take_digits(&text, 2, ':', &hour) || !take_digits(&text, 2, '\0', &minute))
            return form;
        if (*text == ':') {
            text++;
            if (!take_digits(&text, 2, '\0', &second))
                return form;
        }
        if (*text == 'Z' || *text == '+' || *text == '-') {
            zone = *text++;
            if (zone != 'Z' && (!take_digits(&text, 2, ':', &off_hour) ||
                                !take_digits(&text, 2, '\0', &off_minute)))
                return form;
        }
    }
    if (*text != '\0')
        return form;
    if (year < 2000 || year > 2199)
        return "the year is not from 2000 to 2199";
    if (month < 1 || month > 12 || day < 1 ||
        day > month_days[month - 1] + (month == 2 && is_leap(year)))
        return "there is no such day";
    if (hour > 23 || minute > 59 || second > 59)
        return "there is no such time of day";
    if (off_hour > 14 || off_minute > 59)
        return "there is no such time zone";
    if (zone == '\0') {
        struct tm local = {.tm_year = year - 1900,
                           .tm_mon = month - 1,
                           .tm_mday = day,
                           .tm_hour = hour,
                           .tm_min = minute,
                           .tm_sec = second,
                           .tm_isdst = -1};
        *epoch = (long long)mktime(&local);
        return NULL;
    }
    *epoch = days_from_epoch(year, month, day) * DAY_S + hour * HOUR_S + minute * MINUTE_S + second;
    long long offset = off_hour * HOUR_S + off_minute * MINUTE_S;
    *epoch += zone == '-' ? offset : -offset;
    return NULL;
}

static const char *parse_deadline(const char *text, time_t now, char *out)
{
    long long epoch = 0;
    const char *reason;
    struct tm utc;

    if (strncmp(text, "now+", 4) == 0) {
        reason = read_relative(text + 4, &epoch);
        epoch += (long long)now;
    } else {
        reason = read_absolute(text, &epoch);
    }
    if (reason)
        return reason;
    if (epoch < FIRST_S || epoch >= END_S) /* a zone can move the last day out of the range */
        return "the year is not from 2000 to 2199";
    if (epoch <= (long long)now)
        return "this time has passed";
    time_t when = (time_t)epoch;
    if (gmtime_r(&when, &utc) == NULL)
        return "not a date and time";
    strftime(out, FT_MAX_VALUE + 1, "%Y-%m-%dT%H:%M:%SZ", &utc);
    return NULL;
}

const char *ft_canonical(const struct ft_option *option, const char *text, time_t now, char *out)
{
    if (text == NULL || text[0] == '\0')
        return "the value is empty";
    if (strnlen(text, FT_MAX_VALUE + 1) > FT_MAX_VALUE)
        return "the value is too long";
    switch (option->grammar) {
    case FT_G_MODEL:
        return parse_model(option, text, out);
    case FT_G_PATH:
        return parse_path(option, text, out);
    case FT_G_COUNT:
        return parse_count(option, text, out);
    case FT_G_DECIMAL:
        return parse_decimal(option, text, out);
    case FT_G_BATCH:
        return parse_batch(option, text, out);
    case FT_G_GPUS:
        return parse_gpus(option, text, out);
    case FT_G_SHAPE:
        return parse_shape(option, text, out);
    case FT_G_LAYERS:
        return parse_layers(option, text, out);
    case FT_G_CHOICE:
    case FT_G_SWITCH:
        return parse_choice(option, text, out);
    case FT_G_DEADLINE:
        return parse_deadline(text, now, out);
    case FT_G_QUALITY:
        return parse_quality(option, text, out);
    case FT_G_TIME:
        return parse_time(option, text, out);
    }
    return "a grammar this plugin does not know";
}

long long ft_time_seconds(const char *canonical)
{
    long long seconds = 0;
    return read_walltime(canonical, &seconds) ? 0 : seconds;
}

long long ft_deadline_epoch(const char *canonical)
{
    long long epoch = 0;
    return read_absolute(canonical, &epoch) ? 0 : epoch;
}
