/* A stand-in for libdfkv.so over a directory: the calls of dfkv_c_api.h that wire/dfkv.py makes, with what DFKV does.
 *
 * The first member's name is the directory. A key is written once. A file `dead` in it makes every call fail as with a server
 * that is gone, a file `hung` makes every call wait until it is removed. */
#include <inttypes.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

struct client {
  char directory[2048];
  uint64_t model_hash;
};

const char *dfkv_version(void) { return "stand-in"; }

void *dfkv_open(const char *members, uint64_t model_hash, uint32_t page_size, uint32_t dtype_tag, uint32_t flags,
                uint32_t tp_size, uint32_t tp_rank, uint32_t layer_num, uint32_t head_num, uint32_t head_dim) {
  struct client *client = calloc(1, sizeof *client);
  size_t length = strcspn(members, "=");
  if (length >= sizeof client->directory) {
    free(client);
    return NULL;
  }
  memcpy(client->directory, members, length);
  client->model_hash = model_hash;
  return client;
}

static int is_flagged(const struct client *client, const char *flag) {
  char path[4096];
  snprintf(path, sizeof path, "%s/%s", client->directory, flag);
  return access(path, F_OK) == 0;
}

static int answers(const struct client *client) {
  while (is_flagged(client, "hung")) usleep(1000);
  return !is_flagged(client, "dead");
}

static void path_of(const struct client *client, const char *key, char *path, size_t size) {
  int length = snprintf(path, size, "%s/%016" PRIx64 "-", client->directory, client->model_hash);
  snprintf(path + length, size - length, "%s", key);
  for (char *at = path + length; *at; at++)
    if (*at == '/') *at = '+';
}

int dfkv_put(void *handle, const char *key, const void *value, uint64_t num_bytes) {
  char path[4096], temporary[4200];
  if (!answers(handle)) return -1;
  path_of(handle, key, path, sizeof path);
  if (access(path, F_OK) == 0) return 0;
  snprintf(temporary, sizeof temporary, "%s.%d-%p", path, (int)getpid(), (void *)&path);
  FILE *file = fopen(temporary, "wb");
  if (!file) return -1;
  int is_whole = fwrite(value, 1, num_bytes, file) == num_bytes;
  is_whole = fclose(file) == 0 && is_whole;
  return is_whole && rename(temporary, path) == 0 ? 0 : -1;
}

int dfkv_get_auto(void *handle, const char *key, void *target, uint64_t capacity, uint64_t *num_bytes) {
  char path[4096];
  struct stat status;
  *num_bytes = 0;
  if (!answers(handle)) return 0;
  path_of(handle, key, path, sizeof path);
  if (stat(path, &status) != 0 || (uint64_t)status.st_size > capacity) return 0;
  FILE *file = fopen(path, "rb");
  if (!file) return 0;
  *num_bytes = fread(target, 1, status.st_size, file);
  fclose(file);
  return *num_bytes == (uint64_t)status.st_size;
}

int dfkv_batch_exist(void *handle, const char **keys, int num_keys, int *exist) {
  char path[4096];
  int is_there = answers(handle);
  for (int i = 0; i < num_keys; i++) {
    path_of(handle, keys[i], path, sizeof path);
    exist[i] = is_there && access(path, F_OK) == 0;
  }
  return 0;
}

int dfkv_batch_remove(void *handle, const char **keys, int num_keys, int *ok) {
  char path[4096];
  int is_there = answers(handle);
  for (int i = 0; i < num_keys; i++) {
    path_of(handle, keys[i], path, sizeof path);
    ok[i] = is_there;
    if (is_there) unlink(path);
  }
  return 0;
}
