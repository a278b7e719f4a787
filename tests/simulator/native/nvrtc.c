/* A libnvrtc that compiles nothing: whatever the source, the result is the file that NVRTC_RESULT names.
 *
 * NVRTC_KNOWS="75,90" are the architectures that it knows, NVRTC_FAILS names a function that fails, and NVRTC_WANTS is the
 * target that it must be asked for.  With -DnvrtcGetPTX=other that function is missing.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int
fails(const char *function)
{
    const char *chosen = getenv("NVRTC_FAILS");
    return chosen != NULL && strcmp(chosen, function) == 0 ? 6 : 0;
}

static int
known(int *architectures)
{
    const char *text = getenv("NVRTC_KNOWS");
    int count = 0;
    for (char *end; text != NULL && *text != '\0'; text = *end == ',' ? end + 1 : end) {
        const int value = (int)strtol(text, &end, 10);
        if (architectures != NULL) {
            architectures[count] = value;
        }
        count++;
    }
    return count;
}

static size_t
result(char *out)
{
    FILE *file = fopen(getenv("NVRTC_RESULT"), "rb");
    size_t size = 0;
    for (int c; file != NULL && (c = fgetc(file)) != EOF; size++) {
        if (out != NULL) {
            out[size] = (char)c;
        }
    }
    if (file != NULL) {
        fclose(file);
    }
    return size;
}

int nvrtcVersion(int *major, int *minor);
int nvrtcGetNumSupportedArchs(int *count);
int nvrtcGetSupportedArchs(int *architectures);
int nvrtcCreateProgram(void **out, const char *source, const char *name, int headers, const char *const *texts,
                       const char *const *names);
int nvrtcCompileProgram(void *from, int count, const char *const *options);
int nvrtcDestroyProgram(void **from);
int nvrtcGetPTXSize(void *from, size_t *size);
int nvrtcGetPTX(void *from, char *out);
int nvrtcGetCUBINSize(void *from, size_t *size);
int nvrtcGetCUBIN(void *from, char *out);

int
nvrtcVersion(int *major, int *minor)
{
    *major = 13;
    *minor = 0;
    return 0;
}

int
nvrtcGetNumSupportedArchs(int *count)
{
    *count = known(NULL);
    return fails("nvrtcGetNumSupportedArchs");
}

int
nvrtcGetSupportedArchs(int *architectures)
{
    known(architectures);
    return fails("nvrtcGetSupportedArchs");
}

int
nvrtcCreateProgram(void **out, const char *source, const char *name, int headers, const char *const *texts,
                   const char *const *names)
{
    const int code = fails("nvrtcCreateProgram");
    const int right = source != NULL && name != NULL && headers == 0 && texts == NULL && names == NULL;
    *out = code == 0 && right ? malloc(1) : NULL; /* what fails makes nothing that could be destroyed */
    return code;
}

int
nvrtcCompileProgram(void *from, int count, const char *const *options)
{
    const char *wants = getenv("NVRTC_WANTS");
    char target[64];
    snprintf(target, sizeof target, "--gpu-architecture=%s", wants != NULL ? wants : "");
    if (from == NULL || count != 2 || strcmp(options[0], target) != 0) {
        return 5;
    }
    return fails("nvrtcCompileProgram");
}

int
nvrtcDestroyProgram(void **from)
{
    free(*from);
    *from = NULL;
    return 0;
}

int
nvrtcGetPTXSize(void *from, size_t *size)
{
    *size = from != NULL ? result(NULL) : 0;
    return fails("nvrtcGetPTXSize");
}

int
nvrtcGetPTX(void *from, char *out)
{
    return from != NULL && result(out) > 0 ? fails("nvrtcGetPTX") : 1;
}

int
nvrtcGetCUBINSize(void *from, size_t *size)
{
    *size = from != NULL ? result(NULL) : 0;
    return fails("nvrtcGetCUBINSize");
}

int
nvrtcGetCUBIN(void *from, char *out)
{
    return from != NULL && result(out) > 0 ? fails("nvrtcGetCUBIN") : 1;
}
