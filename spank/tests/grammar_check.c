/*
 * Reads lines "NOW<TAB>option<TAB>value[<TAB>option<TAB>value ...]", writes one line for each:
 * "ok<TAB>comment<TAB>json" or "err<TAB>message". The property test drives it.
 * Values may hold the escapes \t \n \\ and \xHH, so that any byte can be tried.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "directive.h"

static void unescape(char *text)
{
    char *to = text;
    for (const char *from = text; *from; from++) {
        if (*from != '\\') {
            *to++ = *from;
            continue;
        }
        from++;
        if (*from == 'x') {
            char hex[3] = {from[1], from[2], '\0'};
            *to++ = (char)strtol(hex, NULL, 16);
            from += 2;
        } else {
            *to++ = *from == 't' ? '\t' : *from == 'n' ? '\n' : *from;
        }
    }
    *to = '\0';
}

static void answer(char *line)
{
    static struct ft_directive directive;
    char message[FT_MESSAGE_BYTES] = "no such option";
    char comment[FT_COMMENT_BYTES], json[FT_MAX_DIRECTIVE_BYTES + 1];
    char *rest = line;
    time_t now = (time_t)strtoll(strsep(&rest, "\t"), NULL, 10);

    memset(&directive, 0, sizeof(directive));
    while (rest) {
        const char *name = strsep(&rest, "\t");
        char *value = rest ? strsep(&rest, "\t") : NULL;
        int index = ft_option_index(name);
        if (value)
            unescape(value);
        if (index < 0 || !ft_directive_set(&directive, index, value, now, message)) {
            printf("err\t%s\n", message);
            return;
        }
    }
    if (!ft_directive_json(&directive, json, sizeof(json), message) ||
        !ft_directive_comment(&directive, comment, sizeof(comment)))
        printf("err\t%s\n", message);
    else
        printf("ok\t%s\t%s\n", comment, json);
}

int main(void)
{
    char *line = NULL;
    size_t room = 0;
    ssize_t length;

    while ((length = getline(&line, &room, stdin)) > 0) {
        if (line[length - 1] == '\n')
            line[length - 1] = '\0';
        answer(line);
        fflush(stdout);
    }
    free(line);
    return 0;
}
