/* What backends share besides the interface. */
#include "core/backend.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

mp_status
mp_error_set(mp_error *err, mp_status status, const char *format, ...)
{
    /* Formatted aside: a caller may put more words around the text that is there. */
    char text[sizeof(err->text)];
    va_list arguments;
    va_start(arguments, format);
    if (vsnprintf(text, sizeof(text), format, arguments) < 0) {
        text[0] = '\0';
    }
    va_end(arguments);
    err->status = status;
    memcpy(err->text, text, strlen(text) + 1);
    return status;
}
