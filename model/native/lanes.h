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
 *  - `_wide`: eight lanes, or twice as many where a register has 16 (types `f32_wide`, `i32_wide`);
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

/* Return the same bits as integers. */
INLINE i32x8 bits_of_x8(f32x8 x) { i32x8 bits; memcpy(&bits, &x, sizeof bits); return bits; }

/* Load the last `count` < 8 elements of a vector in memory; the other lanes are 0. */
INLINE f32x8 load_partial_x8(const float *from, int64_t count) {
    float lanes[LANES] = {0};
    for (int64_t i = 0; i < count; i++) lanes[i] = from[i];
    return load_x8(lanes);
}

/* Load eight codes of 8 or 16 bits as floats; compilers widen 16 bits in two halves. */
INLINE f32x8 load_int8_codes_x8(const int8_t *from) {
#if defined(__AVX2__)
    return (f32x8)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)from)));
#else
    typedef int8_t i8x8 __attribute__((vector_size(LANES)));
    i8x8 codes;
    memcpy(&codes, from, sizeof codes);
    return __builtin_convertvector(codes, f32x8);
#endif
}
INLINE f32x8 load_int16_codes_x8(const int16_t *from) {
#if defined(__AVX2__)
    return (f32x8)_mm256_cvtepi32_ps(_mm256_cvtepi16_epi32(_mm_loadu_si128((const __m128i *)from)));
#else
    typedef int16_t i16x8 __attribute__((vector_size(2 * LANES)));
    i16x8 codes;
    memcpy(&codes, from, sizeof codes);
    return __builtin_convertvector(codes, f32x8);
#endif
}

/* Add the lanes: ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7)). */
INLINE float lane_sum_x8(f32x8 x) {
    return ((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7]));
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

/* --- wide vectors, and functions of their lanes ------------------------------------------------------------------- */

/* A wide vector holds as many `_x8` vectors, side by side, as a register has room for, at least one. */
#define WIDE_LANES (REGISTER_LANES > LANES ? REGISTER_LANES : LANES)
#define WIDE_PARTS (WIDE_LANES / LANES)
typedef float f32_wide __attribute__((vector_size(4 * WIDE_LANES)));
typedef int32_t i32_wide __attribute__((vector_size(4 * WIDE_LANES)));

INLINE f32_wide load_wide(const float *from) { f32_wide x; memcpy(&x, from, sizeof x); return x; }
INLINE void store_wide(float *to, f32_wide x) { memcpy(to, &x, sizeof x); }
INLINE f32_wide broadcast_wide(float x) { return x - (f32_wide){0}; } /* x - 0 is x, also if x is -0 */

/* Return the same bits as integers, or as floats. */
INLINE i32_wide bits_of_wide(f32_wide x) { i32_wide bits; memcpy(&bits, &x, sizeof bits); return bits; }
INLINE f32_wide from_bits_wide(i32_wide bits) { f32_wide x; memcpy(&x, &bits, sizeof x); return x; }

/* Load the same eight lanes for each of those vectors. */
INLINE f32_wide load_repeated_x8(const float *from) {
#if REGISTER_LANES == 16
    return (f32_wide)_mm512_broadcast_f64x4(_mm256_loadu_pd((const double *)from));
#else
    return load_wide(from);
#endif
}

#if REGISTER_LANES == 16
/* In each 128 bits, return the sums of the two pairs of lanes of a, then of b. */
INLINE __m512 pair_sums(__m512 a, __m512 b) {
    return _mm512_add_ps(_mm512_shuffle_ps(a, b, _MM_SHUFFLE(2, 0, 2, 0)),
                         _mm512_shuffle_ps(a, b, _MM_SHUFFLE(3, 1, 3, 1)));
}
#endif

/* Return the lane sums of eight vectors, which lie side by side, each in the order of `lane_sum_x8`. */
INLINE f32x8 lane_sums_x8(const f32_wide x[LANES / WIDE_PARTS]) {
#if REGISTER_LANES == 16
    /* each 128 bits: a half of the lanes of one vector of each wide one */
    __m512 halves = pair_sums(pair_sums((__m512)x[0], (__m512)x[1]), pair_sums((__m512)x[2], (__m512)x[3]));
    __m512 sums = _mm512_add_ps(halves, _mm512_shuffle_f32x4(halves, halves, _MM_SHUFFLE(2, 3, 0, 1)));
    __m512i order = _mm512_setr_epi32(0, 8, 1, 9, 2, 10, 3, 11, 0, 0, 0, 0, 0, 0, 0, 0);
    return (f32x8)_mm512_castps512_ps256(_mm512_permutexvar_ps(order, sums));
#elif defined(__AVX2__)
    __m256 a = _mm256_hadd_ps(_mm256_hadd_ps((__m256)x[0], (__m256)x[1]), _mm256_hadd_ps((__m256)x[2], (__m256)x[3]));
    __m256 b = _mm256_hadd_ps(_mm256_hadd_ps((__m256)x[4], (__m256)x[5]), _mm256_hadd_ps((__m256)x[6], (__m256)x[7]));
    return (f32x8)_mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
#else
    return (f32x8){lane_sum_x8(x[0]), lane_sum_x8(x[1]), lane_sum_x8(x[2]), lane_sum_x8(x[3]),
                   lane_sum_x8(x[4]), lane_sum_x8(x[5]), lane_sum_x8(x[6]), lane_sum_x8(x[7])};
#endif
}

/* Return `yes` in the lanes where `mask` is all ones, else `no`. */
INLINE f32_wide select_wide(i32_wide mask, f32_wide yes, f32_wide no) {
    return from_bits_wide((mask & bits_of_wide(yes)) | (~mask & bits_of_wide(no)));
}
INLINE f32_wide max_wide(f32_wide a, f32_wide b) { return select_wide(a > b, a, b); }

/* The exponential function, with an error of some units in the last place. */
INLINE f32_wide exp_wide(f32_wide x) {
    x = select_wide(x < broadcast_wide(-86.0f), broadcast_wide(-86.0f), x); /* results stay normal and finite */
    x = select_wide(x > broadcast_wide(88.0f), broadcast_wide(88.0f), x);

    /* x = twos * ln 2 + remainder; ln 2 has two parts, the first with so few bits that its product is exact */
    f32_wide shifted = x * 1.44269504f + ROUNDING_SHIFT;
    f32_wide twos = shifted - ROUNDING_SHIFT;
    f32_wide remainder = x - twos * 0.693359375f;
    remainder = remainder - twos * -2.12194440e-4f;

    /* exp(remainder), by a polynomial */
    f32_wide power = broadcast_wide(1.9875691500e-4f);
    power = power * remainder + 1.3981999507e-3f;
    power = power * remainder + 8.3334519073e-3f;
    power = power * remainder + 4.1665795894e-2f;
    power = power * remainder + 1.6666665459e-1f;
    power = power * remainder + 5.0000001201e-1f;
    power = power * remainder * remainder + remainder + 1.0f;

    /* 2^twos, by its bits: an exponent with the bias 127 above 23 bits of fraction */
    i32_wide exponent = (bits_of_wide(shifted) - bits_of_wide(broadcast_wide(ROUNDING_SHIFT)) + 127) << 23;
    return power * from_bits_wide(exponent);
}

/* The hyperbolic tangent: a polynomial for |x| < 0.625, where 1 - 2 / (exp(2 * x) + 1) would lose digits. */
INLINE f32_wide tanh_wide(f32_wide x) {
    f32_wide square = x * x;
    f32_wide power = broadcast_wide(-5.70498872745e-3f);
    power = power * square + 2.06390887954e-2f;
    power = power * square + -5.37397155531e-2f;
    power = power * square + 1.33314422036e-1f;
    power = power * square + -3.33332819422e-1f;
    return select_wide(square < broadcast_wide(0.625f * 0.625f), power * square * x + x,
                       1.0f - 2.0f / (exp_wide(x + x) + 1.0f));
}

/* --- products of codes -------------------------------------------------------------------------------------------- */

/* A weight's codes have 8 bits, or are nibbles. Those of a row have 16, since with 8 texts differ from those of floats.
 * The sum of a group's products is exact, since it stays below 2^31: 32 * 128 * MAX_ROW_CODE < 2^27.
 *
 * A group is GROUP successive inputs, of which the first SUBGROUP ones and the others are its two subgroups. A unit is
 * UNIT successive inputs of each output of a register: bytes `[REGISTER_LANES, UNIT]`, of codes or of pairs of nibbles.
 * `dot` adds to the sum of each output the products of its unit of weights with the same unit of a row, which
 * `store_unit` wrote. `total` returns such sums. */
#define GROUP 32
#define SUBGROUP (GROUP / 2)
#define UNIT 4
#define NIBBLE_BITS 4
#define NIBBLE_MASK 15
#define MAX_ROW_CODE 32639 /* 127 * 256 + 127: it has two signed halves of 8 bits */

#if defined(__ARM_FEATURE_DOTPROD) /* NEON multiplies 8 bits by 8: a row's unit is four upper halves, then the lower */

typedef int8x16_t weight_unit;
typedef struct { int32x4_t upper, lower; } code_sums;

INLINE weight_unit load_int8(const uint8_t *from) { return vreinterpretq_s8_u8(vld1q_u8(from)); }
INLINE weight_unit load_low_nibbles(const uint8_t *from) {
    return vreinterpretq_s8_u8(vandq_u8(vld1q_u8(from), vdupq_n_u8(NIBBLE_MASK)));
}
INLINE weight_unit load_high_nibbles(const uint8_t *from) {
    return vreinterpretq_s8_u8(vshrq_n_u8(vld1q_u8(from), NIBBLE_BITS));
}
INLINE void store_unit(int16_t *row, const int16_t codes[UNIT]) {
    int8_t halves[2 * UNIT];
    for (int i = 0; i < UNIT; i++) {
        int upper = (codes[i] + 128) >> 8; /* rounded, so that what is left lies between -128 and 127 */
        halves[i] = (int8_t)upper;
        halves[UNIT + i] = (int8_t)(codes[i] - 256 * upper);
    }
    memcpy(row, halves, sizeof halves);
}
INLINE code_sums dot(code_sums sums, weight_unit weights, const int16_t *row) {
    int8x8_t halves = vld1_s8((const int8_t *)row);
    return (code_sums){vdotq_lane_s32(sums.upper, weights, halves, 0), vdotq_lane_s32(sums.lower, weights, halves, 1)};
}
INLINE i32_register total(code_sums sums) { return (i32_register)vaddq_s32(vshlq_n_s32(sums.upper, 8), sums.lower); }

#else /* pairs of 16 bits: the first and third input of a unit, then the second and fourth one */

typedef int16_t i16_register __attribute__((vector_size(4 * REGISTER_LANES)));
typedef uint16_t u16_register __attribute__((vector_size(4 * REGISTER_LANES)));
typedef struct { i16_register even, odd; } weight_unit;
typedef i32_register code_sums;

INLINE u16_register load_bytes(const uint8_t *from) { u16_register x; memcpy(&x, from, sizeof x); return x; }
INLINE weight_unit load_int8(const uint8_t *from) {
    u16_register bytes = load_bytes(from);
    return (weight_unit){(i16_register)(bytes << 8) >> 8, (i16_register)bytes >> 8};
}
INLINE weight_unit load_low_nibbles(const uint8_t *from) {
    u16_register bytes = load_bytes(from);
    return (weight_unit){(i16_register)(bytes & NIBBLE_MASK), (i16_register)(bytes >> 8 & NIBBLE_MASK)};
}
INLINE weight_unit load_high_nibbles(const uint8_t *from) {
    u16_register bytes = load_bytes(from);
    return (weight_unit){(i16_register)(bytes >> NIBBLE_BITS & NIBBLE_MASK),
                         (i16_register)(bytes >> (8 + NIBBLE_BITS))};
}
INLINE void store_unit(int16_t *row, const int16_t codes[UNIT]) {
    int16_t pairs[UNIT] = {codes[0], codes[2], codes[1], codes[3]};
    memcpy(row, pairs, sizeof pairs);
}

/* Add to the sum of each output the products of its pair of weights with a pair of a row. */
INLINE code_sums dot_pair(code_sums sums, i16_register weights, const int16_t *row) {
#if defined(__AVX2__)
    int32_t pair;
    memcpy(&pair, row, sizeof pair);
#if REGISTER_LANES == 16
    return (code_sums)_mm512_dpwssd_epi32((__m512i)sums, (__m512i)weights, _mm512_set1_epi32(pair));
#else
    return sums + (code_sums)_mm256_madd_epi16((__m256i)weights, _mm256_set1_epi32(pair));
#endif
#else
    i32_register pairs = (i32_register)weights; /* the first weight of a pair in the low bits, as bytes lie in memory */
    return sums + (pairs << 16 >> 16) * row[0] + (pairs >> 16) * row[1];
#endif
}
INLINE code_sums dot(code_sums sums, weight_unit weights, const int16_t *row) {
    return dot_pair(dot_pair(sums, weights.even, row), weights.odd, row + 2);
}
INLINE i32_register total(code_sums sums) { return sums; }

#endif
#endif
