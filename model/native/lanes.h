/* Vectors, and the few operations that each instruction set has of its own.
 *
 * Every number type has one set of bits on all instruction sets. So there are only sums and products of single numbers
 * (-ffp-contract=off: no fused ones, which not all processors have), in one order:
 *  - a sum over a vector in memory has eight lanes: element i goes to lane i % 8, and `lane_sum_x8` adds the lanes;
 *  - a matrix product has a lane for each output, which adds its inputs in their order.
 * Sums of integers are exact in any order, so instruction sets may differ in them.
 *
 * Names say on what a function works:
 *  - `_x8`: eight lanes of 32 bits, on all instruction sets (types `f32x8`, `i32x8`);
 *  - `_register`: as many lanes as a register of this instruction set has (types `f32_register`, `i32_register`);
 *  - `_int8`, `_int4`: weights whose codes have 8 or 4 bits. A code of 4 bits is a nibble: two of them share a byte.
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

#define LANES 8
#define ROUNDING_SHIFT 12582912.0f /* 1.5 * 2^23: adding it rounds to a whole number, in the lowest bits of the sum */

typedef float f32x8 __attribute__((vector_size(4 * LANES)));
typedef int32_t i32x8 __attribute__((vector_size(4 * LANES)));

INLINE f32x8 load_x8(const float *from) { f32x8 x; memcpy(&x, from, sizeof x); return x; }
INLINE void store_x8(float *to, f32x8 x) { memcpy(to, &x, sizeof x); }
INLINE f32x8 broadcast_x8(float x) { return (f32x8){x, x, x, x, x, x, x, x}; }

/* Return the same bits as integers, or as floats. */
INLINE i32x8 bits_of_x8(f32x8 x) { i32x8 bits; memcpy(&bits, &x, sizeof bits); return bits; }
INLINE f32x8 from_bits_x8(i32x8 bits) { f32x8 x; memcpy(&x, &bits, sizeof x); return x; }

/* Load the last `count` < 8 elements of a vector in memory; the other lanes are 0. */
INLINE f32x8 load_partial_x8(const float *from, int64_t count) {
    float lanes[LANES] = {0};
    for (int64_t i = 0; i < count; i++) lanes[i] = from[i];
    return load_x8(lanes);
}

/* Load eight codes of 8 bits as floats. */
INLINE f32x8 load_codes_x8(const int8_t *from) {
    typedef int8_t i8x8 __attribute__((vector_size(LANES)));
    i8x8 codes;
    memcpy(&codes, from, sizeof codes);
    return __builtin_convertvector(codes, f32x8);
}

/* Return `yes` in the lanes where `mask` is all ones, else `no`. */
INLINE f32x8 select_x8(i32x8 mask, f32x8 yes, f32x8 no) {
    return from_bits_x8((mask & bits_of_x8(yes)) | (~mask & bits_of_x8(no)));
}
INLINE f32x8 max_x8(f32x8 a, f32x8 b) { return select_x8(a > b, a, b); }

/* Add the lanes: ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7)). */
INLINE float lane_sum_x8(f32x8 x) {
    return ((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7]));
}

/* Return the lane sums of eight vectors, each in the order of `lane_sum_x8`. */
INLINE f32x8 lane_sums_x8(const f32x8 x[LANES]) {
#if defined(__AVX2__)
    __m256 a = _mm256_hadd_ps(_mm256_hadd_ps((__m256)x[0], (__m256)x[1]), _mm256_hadd_ps((__m256)x[2], (__m256)x[3]));
    __m256 b = _mm256_hadd_ps(_mm256_hadd_ps((__m256)x[4], (__m256)x[5]), _mm256_hadd_ps((__m256)x[6], (__m256)x[7]));
    return (f32x8)_mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
#else
    return (f32x8){lane_sum_x8(x[0]), lane_sum_x8(x[1]), lane_sum_x8(x[2]), lane_sum_x8(x[3]),
                   lane_sum_x8(x[4]), lane_sum_x8(x[5]), lane_sum_x8(x[6]), lane_sum_x8(x[7])};
#endif
}

/* The exponential function, with an error of some units in the last place. */
INLINE f32x8 exp_x8(f32x8 x) {
    x = select_x8(x < broadcast_x8(-86.0f), broadcast_x8(-86.0f), x); /* results stay normal and finite */
    x = select_x8(x > broadcast_x8(88.0f), broadcast_x8(88.0f), x);

    /* x = twos * ln 2 + remainder; ln 2 has two parts, the first with so few bits that its product is exact */
    f32x8 shifted = x * 1.44269504f + ROUNDING_SHIFT;
    f32x8 twos = shifted - ROUNDING_SHIFT;
    f32x8 remainder = x - twos * 0.693359375f;
    remainder = remainder - twos * -2.12194440e-4f;

    /* exp(remainder), by a polynomial */
    f32x8 power = broadcast_x8(1.9875691500e-4f);
    power = power * remainder + 1.3981999507e-3f;
    power = power * remainder + 8.3334519073e-3f;
    power = power * remainder + 4.1665795894e-2f;
    power = power * remainder + 1.6666665459e-1f;
    power = power * remainder + 5.0000001201e-1f;
    power = power * remainder * remainder + remainder + 1.0f;

    /* 2^twos, by its bits: an exponent with the bias 127 above 23 bits of fraction */
    i32x8 exponent = (bits_of_x8(shifted) - bits_of_x8(broadcast_x8(ROUNDING_SHIFT)) + 127) << 23;
    return power * from_bits_x8(exponent);
}

/* The hyperbolic tangent: a polynomial for |x| < 0.625, where 1 - 2 / (exp(2 * x) + 1) would lose digits. */
INLINE f32x8 tanh_x8(f32x8 x) {
    f32x8 square = x * x;
    f32x8 power = broadcast_x8(-5.70498872745e-3f);
    power = power * square + 2.06390887954e-2f;
    power = power * square + -5.37397155531e-2f;
    power = power * square + 1.33314422036e-1f;
    power = power * square + -3.33332819422e-1f;
    return select_x8(square < broadcast_x8(0.625f * 0.625f), power * square * x + x,
                     1.0f - 2.0f / (exp_x8(x + x) + 1.0f));
}

/* --- registers, and tiles of accumulators ------------------------------------------------------------------------- */

/* A panel is PANEL outputs of a weight, which are packed together. A tile is up to TILE_ROWS rows times the outputs of
 * a panel: its accumulators are TILE_ROWS * PANEL_REGISTERS registers, and stay there while inputs are added. */
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#define REGISTER_LANES 16
#define TILE_ROWS 8
#elif defined(__AVX2__)
#define REGISTER_LANES 8
#define TILE_ROWS 4
#else
#define REGISTER_LANES 4
#define TILE_ROWS 2
#endif
#define PANEL 16
#define PANEL_REGISTERS (PANEL / REGISTER_LANES)

typedef float f32_register __attribute__((vector_size(4 * REGISTER_LANES)));
typedef int32_t i32_register __attribute__((vector_size(4 * REGISTER_LANES)));

INLINE f32_register load_f32_register(const float *from) { f32_register x; memcpy(&x, from, sizeof x); return x; }
INLINE void store_f32_register(float *to, f32_register x) { memcpy(to, &x, sizeof x); }
INLINE f32_register to_f32_register(i32_register x) { return __builtin_convertvector(x, f32_register); }

/* Load numbers in bfloat16, which are the upper 16 bits of numbers in float32. */
INLINE f32_register load_bf16_register(const uint16_t *from) {
    typedef uint16_t u16_lanes __attribute__((vector_size(2 * REGISTER_LANES)));
    typedef uint32_t u32_lanes __attribute__((vector_size(4 * REGISTER_LANES)));
    u16_lanes upper;
    memcpy(&upper, from, sizeof upper);
    u32_lanes bits = __builtin_convertvector(upper, u32_lanes) << 16;
    f32_register x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* --- products of codes -------------------------------------------------------------------------------------------- */

/* A group is GROUP successive inputs, of which the first SUBGROUP ones and the others are its two subgroups.
 *
 * A unit is some successive inputs (UNIT_INT8 or UNIT_INT4) of each output of a register: codes
 * `[REGISTER_LANES, unit]`. `dot_int8` adds to the accumulator of each output the products of its unit of 8-bit
 * weights with the same unit of a row. `dot_int4` does that with nibbles, in accumulators of the type `sums_int4`,
 * which are large enough for the inputs of one group; `widen_int4` returns them in 32 bits.
 *
 * A row's codes have 8 bits for both, stored in the types `code_for_int8` and `code_for_int4`. A packed weight of
 * 8 bits is its code + OFFSET_INT8. */
#define GROUP 32
#define SUBGROUP (GROUP / 2)
#define NIBBLE_BITS 4
#define NIBBLE_MASK 15

#if REGISTER_LANES == 16 /* AVX-512 with VNNI: u8 weights times s8 rows, four inputs at once */

#define UNIT_INT8 4
#define UNIT_INT4 4
#define OFFSET_INT8 128
typedef int8_t code_for_int8;
typedef int8_t code_for_int4;
typedef __m512i weight_unit;
typedef i32_register sums_int4;

INLINE weight_unit load_int8(const uint8_t *from) { return _mm512_loadu_si512(from); }
INLINE weight_unit load_low_nibbles(const uint8_t *from) {
    return _mm512_and_si512(_mm512_loadu_si512(from), _mm512_set1_epi8(NIBBLE_MASK));
}
INLINE weight_unit load_high_nibbles(const uint8_t *from) {
    __m512i shifted = _mm512_srli_epi16(_mm512_loadu_si512(from), NIBBLE_BITS);
    return _mm512_and_si512(shifted, _mm512_set1_epi8(NIBBLE_MASK));
}
INLINE i32_register dot_int8(i32_register sums, weight_unit weights, const code_for_int8 *row) {
    int32_t row_unit;
    memcpy(&row_unit, row, sizeof row_unit);
    return (i32_register)_mm512_dpbusd_epi32((__m512i)sums, weights, _mm512_set1_epi32(row_unit));
}
INLINE sums_int4 dot_int4(sums_int4 sums, weight_unit weights, const code_for_int4 *row) {
    return dot_int8(sums, weights, row);
}
INLINE i32_register widen_int4(sums_int4 sums) { return sums; }

#elif REGISTER_LANES == 8 /* AVX2: 8-bit weights widened to 16 bits, in pairs; nibbles in fours, summed in 16 bits */

#define UNIT_INT8 2
#define UNIT_INT4 4
#define OFFSET_INT8 0
typedef int16_t code_for_int8;
typedef int8_t code_for_int4;
typedef __m256i weight_unit;
typedef __m256i sums_int4; /* two sums of 16 bits for each output */

INLINE weight_unit load_int8(const uint8_t *from) {
    return _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)from));
}
INLINE weight_unit load_low_nibbles(const uint8_t *from) {
    return _mm256_and_si256(_mm256_loadu_si256((const __m256i *)from), _mm256_set1_epi8(NIBBLE_MASK));
}
INLINE weight_unit load_high_nibbles(const uint8_t *from) {
    __m256i shifted = _mm256_srli_epi16(_mm256_loadu_si256((const __m256i *)from), NIBBLE_BITS);
    return _mm256_and_si256(shifted, _mm256_set1_epi8(NIBBLE_MASK));
}
INLINE i32_register dot_int8(i32_register sums, weight_unit weights, const code_for_int8 *row) {
    int32_t row_unit;
    memcpy(&row_unit, row, sizeof row_unit);
    __m256i products = _mm256_madd_epi16(weights, _mm256_set1_epi32(row_unit));
    return (i32_register)_mm256_add_epi32((__m256i)sums, products);
}
INLINE sums_int4 dot_int4(sums_int4 sums, weight_unit weights, const code_for_int4 *row) {
    int32_t row_unit;
    memcpy(&row_unit, row, sizeof row_unit);
    __m256i products = _mm256_maddubs_epi16(weights, _mm256_set1_epi32(row_unit));
    return _mm256_add_epi16(sums, products); /* for a group: |sum| <= 8 * 2 * 15 * 127 < 2^15 */
}
INLINE i32_register widen_int4(sums_int4 sums) { return (i32_register)_mm256_madd_epi16(sums, _mm256_set1_epi16(1)); }

#elif defined(__ARM_FEATURE_DOTPROD) /* NEON: s8 times s8, four inputs at once */

#define UNIT_INT8 4
#define UNIT_INT4 4
#define OFFSET_INT8 0
typedef int8_t code_for_int8;
typedef int8_t code_for_int4;
typedef int8x16_t weight_unit;
typedef i32_register sums_int4;

INLINE weight_unit load_int8(const uint8_t *from) { return vreinterpretq_s8_u8(vld1q_u8(from)); }
INLINE weight_unit load_low_nibbles(const uint8_t *from) {
    return vreinterpretq_s8_u8(vandq_u8(vld1q_u8(from), vdupq_n_u8(NIBBLE_MASK)));
}
INLINE weight_unit load_high_nibbles(const uint8_t *from) {
    return vreinterpretq_s8_u8(vshrq_n_u8(vld1q_u8(from), NIBBLE_BITS));
}
INLINE i32_register dot_int8(i32_register sums, weight_unit weights, const code_for_int8 *row) {
    int32_t row_unit;
    memcpy(&row_unit, row, sizeof row_unit);
    return (i32_register)vdotq_s32((int32x4_t)sums, weights, vreinterpretq_s8_s32(vdupq_n_s32(row_unit)));
}
INLINE sums_int4 dot_int4(sums_int4 sums, weight_unit weights, const code_for_int4 *row) {
    return dot_int8(sums, weights, row);
}
INLINE i32_register widen_int4(sums_int4 sums) { return sums; }

#else /* plain C, in pairs */

#define UNIT_INT8 2
#define UNIT_INT4 2
#define OFFSET_INT8 0
typedef int16_t code_for_int8;
typedef int16_t code_for_int4;
typedef struct { i32_register first, second; } weight_unit; /* the first input of each output, and the second one */
typedef i32_register sums_int4;

INLINE weight_unit load_int8(const uint8_t *from) {
    const int8_t *w = (const int8_t *)from;
    return (weight_unit){{w[0], w[2], w[4], w[6]}, {w[1], w[3], w[5], w[7]}};
}
INLINE weight_unit load_low_nibbles(const uint8_t *w) {
    return (weight_unit){{w[0] & NIBBLE_MASK, w[2] & NIBBLE_MASK, w[4] & NIBBLE_MASK, w[6] & NIBBLE_MASK},
                         {w[1] & NIBBLE_MASK, w[3] & NIBBLE_MASK, w[5] & NIBBLE_MASK, w[7] & NIBBLE_MASK}};
}
INLINE weight_unit load_high_nibbles(const uint8_t *w) {
    return (weight_unit){{w[0] >> NIBBLE_BITS, w[2] >> NIBBLE_BITS, w[4] >> NIBBLE_BITS, w[6] >> NIBBLE_BITS},
                         {w[1] >> NIBBLE_BITS, w[3] >> NIBBLE_BITS, w[5] >> NIBBLE_BITS, w[7] >> NIBBLE_BITS}};
}
INLINE i32_register dot_int8(i32_register sums, weight_unit weights, const code_for_int8 *row) {
    return sums + weights.first * row[0] + weights.second * row[1];
}
INLINE sums_int4 dot_int4(sums_int4 sums, weight_unit weights, const code_for_int4 *row) {
    return dot_int8(sums, weights, row);
}
INLINE i32_register widen_int4(sums_int4 sums) { return sums; }

#endif
#endif
