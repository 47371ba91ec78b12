// What lets a library that was compiled with a new GCC and glibc run where torch does: with glibc
// 2.28, and the libstdc++ of GCC 8. Two functions alone would need newer ones.

#pragma once

#include <features.h>

#include <vector>

#if defined(__GLIBC__) && defined(__x86_64__)
// glibc 2.29 gave log a second version, which sets errno in fewer cases. The first computes the same.
__asm__(".symver log, log@GLIBC_2.2.5");
#endif

#if defined(__GLIBCXX__) && _GLIBCXX_RELEASE >= 11
// Containers call it since GCC 11 if a size overflows, which before was bad_alloc. Defined here it is
// not asked of libstdc++; nothing of ours catches it.
void std::__throw_bad_array_new_length() { std::__throw_bad_alloc(); }
#endif
