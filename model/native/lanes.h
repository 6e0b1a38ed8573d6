/* Vectors, and the few operations that each instruction set has of its own.
 *
 * Every number type has one set of bits on all instruction sets. So there are only sums and products of single numbers
 * (-ffp-contract=off: no fused ones, which not all processors have), in one order:
 *  - a sum over a row of numbers has eight lanes: number i goes to lane i % 8, and `sum8` adds the lanes;
 *  - a matrix product has a lane for each output, which adds its inputs in their order.
 * Sums of integers are exact in any order, so instruction sets may differ in them.
 *
 * Names of functions on eight floats end in 8 (`exp8`, `load8`). In names of weights, rows and integer products 8 and 4
 * are the bits of a weight (`number8`, `dot4`).
 */
#ifndef LANES_H
#define LANES_H

#include <stdint.h>
#include <string.h>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
#endif

#define INLINE static inline __attribute__((always_inline))

/* --- eight lanes -------------------------------------------------------------------------------------------------- */

typedef float f8 __attribute__((vector_size(32)));
typedef int32_t i8 __attribute__((vector_size(32)));

INLINE f8 load8(const float *from) { f8 x; memcpy(&x, from, sizeof x); return x; }
INLINE void store8(float *to, f8 x) { memcpy(to, &x, sizeof x); }
INLINE f8 all8(float x) { return (f8){x, x, x, x, x, x, x, x}; }
/* Return the same bits as integers, or as floats. */
INLINE i8 to_bits8(f8 x) { i8 y; memcpy(&y, &x, sizeof y); return y; }
INLINE f8 from_bits8(i8 x) { f8 y; memcpy(&y, &x, sizeof y); return y; }

/* Load the last `count` < 8 numbers of a row; the other lanes are 0. */
INLINE f8 load_rest8(const float *from, int64_t count) {
    float lanes[8] = {0};
    for (int64_t i = 0; i < count; i++) lanes[i] = from[i];
    return load8(lanes);
}

/* Load eight whole numbers of 8 bits. */
INLINE f8 load_codes8(const int8_t *from) {
    typedef int8_t b8 __attribute__((vector_size(8)));
    b8 codes;
    memcpy(&codes, from, sizeof codes);
    return __builtin_convertvector(codes, f8);
}

/* Return `yes` in the lanes where `mask` is all ones, else `no`. */
INLINE f8 pick8(i8 mask, f8 yes, f8 no) { return from_bits8((mask & to_bits8(yes)) | (~mask & to_bits8(no))); }
INLINE f8 max8(f8 a, f8 b) { return pick8(a > b, a, b); }

/* Add the lanes: ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7)). */
INLINE float sum8(f8 x) {
    return ((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7]));
}

/* Return the sums of the lanes of eight vectors. */
INLINE f8 sums8(const f8 x[8]) {
#if defined(__AVX2__)
    __m256 a = _mm256_hadd_ps(_mm256_hadd_ps((__m256)x[0], (__m256)x[1]), _mm256_hadd_ps((__m256)x[2], (__m256)x[3]));
    __m256 b = _mm256_hadd_ps(_mm256_hadd_ps((__m256)x[4], (__m256)x[5]), _mm256_hadd_ps((__m256)x[6], (__m256)x[7]));
    return (f8)_mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
#else
    return (f8){sum8(x[0]), sum8(x[1]), sum8(x[2]), sum8(x[3]), sum8(x[4]), sum8(x[5]), sum8(x[6]), sum8(x[7])};
#endif
}

/* The exponential function, with an error of some units in the last place. */
INLINE f8 exp8(f8 x) {
    const float magic = 12582912.0f; /* 1.5 * 2^23: adding it rounds to a whole number, in the lowest bits */
    x = pick8(x < all8(-86.0f), all8(-86.0f), x);
    x = pick8(x > all8(88.0f), all8(88.0f), x);

    /* x = twos * ln 2 + rest; ln 2 has two parts, the first with so few bits that its product is exact */
    f8 shifted = x * 1.44269504f + magic;
    f8 twos = shifted - magic;
    f8 rest = x - twos * 0.693359375f;
    rest = rest - twos * -2.12194440e-4f;

    f8 power = all8(1.9875691500e-4f);
    power = power * rest + 1.3981999507e-3f;
    power = power * rest + 8.3334519073e-3f;
    power = power * rest + 4.1665795894e-2f;
    power = power * rest + 1.6666665459e-1f;
    power = power * rest + 5.0000001201e-1f;
    power = power * rest * rest + rest + 1.0f;
    i8 exponent = (to_bits8(shifted) - to_bits8(all8(magic)) + 127) << 23;
    return power * from_bits8(exponent);
}

/* The hyperbolic tangent: a polynomial near 0, where 1 - 2 / (exp(2 * x) + 1) would lose digits. */
INLINE f8 tanh8(f8 x) {
    f8 square = x * x;
    f8 power = all8(-5.70498872745e-3f);
    power = power * square + 2.06390887954e-2f;
    power = power * square + -5.37397155531e-2f;
    power = power * square + 1.33314422036e-1f;
    power = power * square + -3.33332819422e-1f;
    return pick8(square < all8(0.390625f), power * square * x + x, 1.0f - 2.0f / (exp8(x + x) + 1.0f));
}

/* --- a block of sixteen outputs ----------------------------------------------------------------------------------- */

/* WIDTH lanes fill a register. ROWS is the most rows that a product computes at once, so that sums stay in registers. */
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#define WIDTH 16
#define ROWS 8
#elif defined(__AVX2__)
#define WIDTH 8
#define ROWS 4
#else
#define WIDTH 4
#define ROWS 2
#endif
#define BLOCK 16
#define PARTS (BLOCK / WIDTH)

typedef float fw __attribute__((vector_size(4 * WIDTH)));
typedef int32_t iw __attribute__((vector_size(4 * WIDTH)));

INLINE fw load_floats(const float *from) { fw x; memcpy(&x, from, sizeof x); return x; }
INLINE void store_floats(float *to, fw x) { memcpy(to, &x, sizeof x); }
INLINE fw to_floats(iw x) { return __builtin_convertvector(x, fw); }

/* Load numbers in bfloat16, which are the upper halves of numbers in float32. */
INLINE fw load_halves(const uint16_t *from) {
    typedef uint16_t hw __attribute__((vector_size(2 * WIDTH)));
    typedef uint32_t uw __attribute__((vector_size(4 * WIDTH)));
    hw half;
    memcpy(&half, from, sizeof half);
    uw whole = __builtin_convertvector(half, uw) << 16;
    fw x;
    memcpy(&x, &whole, sizeof x);
    return x;
}

/* --- products of whole numbers ------------------------------------------------------------------------------------ */

/* A unit is UNIT successive inputs of WIDTH outputs, `[WIDTH, UNIT]`. `dot8` adds to each output the products of its
 * unit of 8-bit weights with a unit of a row; `dot4` does that with codes of 4 bits, in sums of the type `sum4`, which
 * are large enough for GROUP inputs. A stored weight of 8 bits is the weight + OFFSET8. */
#define GROUP 32
#define HALF (GROUP / 2)

#if WIDTH == 16 /* AVX-512 with VNNI: u8 weights times s8 rows, four inputs at once */

#define UNIT8 4
#define UNIT4 4
#define OFFSET8 128
typedef int8_t number8;
typedef int8_t number4;
typedef __m512i weights;
typedef iw sum4;
INLINE weights load_weights8(const uint8_t *from) { return _mm512_loadu_si512(from); }
INLINE weights low_codes(const uint8_t *from) { return _mm512_and_si512(_mm512_loadu_si512(from), _mm512_set1_epi8(15)); }
INLINE weights high_codes(const uint8_t *from) {
    return _mm512_and_si512(_mm512_srli_epi16(_mm512_loadu_si512(from), 4), _mm512_set1_epi8(15));
}
INLINE iw dot8(iw sum, weights w, const number8 *row) {
    int32_t unit;
    memcpy(&unit, row, sizeof unit);
    return (iw)_mm512_dpbusd_epi32((__m512i)sum, w, _mm512_set1_epi32(unit));
}
INLINE sum4 dot4(sum4 sum, weights w, const number4 *row) { return dot8(sum, w, row); }
/* Return the 32-bit sums of a chain of `dot4`, which AVX2 keeps as sums of 16 bits. */
INLINE iw closed4(sum4 sum) { return sum; }

#elif WIDTH == 8 /* AVX2: 8-bit weights widened to 16 bits, in pairs; codes in fours, whose sums fit into 16 bits */

#define UNIT8 2
#define UNIT4 4
#define OFFSET8 0
typedef int16_t number8;
typedef int8_t number4;
typedef __m256i weights;
typedef __m256i sum4;
INLINE weights load_weights8(const uint8_t *from) {
    return _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)from));
}
INLINE weights low_codes(const uint8_t *from) {
    return _mm256_and_si256(_mm256_loadu_si256((const __m256i *)from), _mm256_set1_epi8(15));
}
INLINE weights high_codes(const uint8_t *from) {
    __m256i pairs = _mm256_loadu_si256((const __m256i *)from);
    return _mm256_and_si256(_mm256_srli_epi16(pairs, 4), _mm256_set1_epi8(15));
}
INLINE iw dot8(iw sum, weights w, const number8 *row) {
    int32_t unit;
    memcpy(&unit, row, sizeof unit);
    return (iw)_mm256_add_epi32((__m256i)sum, _mm256_madd_epi16(w, _mm256_set1_epi32(unit)));
}
INLINE sum4 dot4(sum4 sum, weights w, const number4 *row) { /* |sum| <= 8 * 2 * 15 * 127 < 2^15 */
    int32_t unit;
    memcpy(&unit, row, sizeof unit);
    return _mm256_add_epi16(sum, _mm256_maddubs_epi16(w, _mm256_set1_epi32(unit)));
}
INLINE iw closed4(sum4 sum) { return (iw)_mm256_madd_epi16(sum, _mm256_set1_epi16(1)); }

#elif defined(__ARM_FEATURE_DOTPROD) /* NEON: s8 times s8, four inputs at once */

#define UNIT8 4
#define UNIT4 4
#define OFFSET8 0
typedef int8_t number8;
typedef int8_t number4;
typedef int8x16_t weights;
typedef iw sum4;
INLINE weights load_weights8(const uint8_t *from) { return vreinterpretq_s8_u8(vld1q_u8(from)); }
INLINE weights low_codes(const uint8_t *from) { return vreinterpretq_s8_u8(vandq_u8(vld1q_u8(from), vdupq_n_u8(15))); }
INLINE weights high_codes(const uint8_t *from) { return vreinterpretq_s8_u8(vshrq_n_u8(vld1q_u8(from), 4)); }
INLINE iw dot8(iw sum, weights w, const number8 *row) {
    int32_t unit;
    memcpy(&unit, row, sizeof unit);
    return (iw)vdotq_s32((int32x4_t)sum, w, vreinterpretq_s8_s32(vdupq_n_s32(unit)));
}
INLINE sum4 dot4(sum4 sum, weights w, const number4 *row) { return dot8(sum, w, row); }
INLINE iw closed4(sum4 sum) { return sum; }

#else /* plain C, in pairs */

#define UNIT8 2
#define UNIT4 2
#define OFFSET8 0
typedef int16_t number8;
typedef int16_t number4;
typedef struct { iw first, second; } weights;
typedef iw sum4;
INLINE weights load_weights8(const uint8_t *from) {
    const int8_t *w = (const int8_t *)from;
    return (weights){{w[0], w[2], w[4], w[6]}, {w[1], w[3], w[5], w[7]}};
}
INLINE weights low_codes(const uint8_t *w) {
    return (weights){{w[0] & 15, w[2] & 15, w[4] & 15, w[6] & 15}, {w[1] & 15, w[3] & 15, w[5] & 15, w[7] & 15}};
}
INLINE weights high_codes(const uint8_t *w) {
    return (weights){{w[0] >> 4, w[2] >> 4, w[4] >> 4, w[6] >> 4}, {w[1] >> 4, w[3] >> 4, w[5] >> 4, w[7] >> 4}};
}
INLINE iw dot8(iw sum, weights w, const number8 *row) { return sum + w.first * row[0] + w.second * row[1]; }
INLINE sum4 dot4(sum4 sum, weights w, const number4 *row) { return dot8(sum, w, row); }
INLINE iw closed4(sum4 sum) { return sum; }

#endif
#endif
