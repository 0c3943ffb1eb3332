/* Included by kernels.c once for each size of heads: GROUP queries share a key head of DIM numbers. Constants let the compiler keep queries and
 * sums in registers.
 *
 * One token and one key head: GROUP queries over positions [first, last], softmax online in tiles (Milakov & Gimelshein 2018).
 * keys [capacity / LANES, dim, LANES], so that the scores of 16 positions are one sum without a reduction; values [capacity, dim]. */
static void ATTEND(GROUP, NAMED)(const T *query, const T *keys, const T *values, T *out, int64_t first, int64_t last, int dim,
                                 float scaling, float softcap) {
    enum { group = GROUP };
    const int whole = DIM / LANES, rest = DIM % LANES;
    vector acc[group][(DIM_BOUND + LANES - 1) / LANES];
    float q[group][DIM_BOUND], tail[group][LANES], peak[group], total[group];
    (void)dim; /* a constant in most versions */
    for (int g = 0; g < group; g++) {
        for (int i = 0; i < DIM; i++) q[g][i] = LOAD(query[g * DIM + i]) * scaling;
        for (int i = 0; i < whole; i++) acc[g][i] = (vector){0};
        for (int i = 0; i < rest; i++) tail[g][i] = 0.0f;
        peak[g] = -INFINITY;
        total[g] = 0.0f;
    }
    for (int64_t start = first / TILE * TILE; start <= last; start += TILE) {
        const T *low = keys + start * DIM, *high = low + LANES * DIM;
        float scores[group][TILE];
        vector sums[group][2];
        for (int g = 0; g < group; g++) sums[g][0] = sums[g][1] = (vector){0};
        for (int i = 0; i < DIM; i++) {
            vector a = load(low + i * LANES), b = load(high + i * LANES);
            for (int g = 0; g < group; g++) {
                sums[g][0] += q[g][i] * a;
                sums[g][1] += q[g][i] * b;
            }
        }
        int from = start < first ? (int)(first - start) : 0;
        int to = last - start + 1 < TILE ? (int)(last - start + 1) : TILE;
        for (int g = 0; g < group; g++) {
            memcpy(scores[g], sums[g], sizeof scores[g]);
            if (softcap > 0.0f)
                for (int t = from; t < to; t++) scores[g][t] = softcap * tanhf(scores[g][t] / softcap);
            for (int t = 0; t < from; t++) scores[g][t] = -INFINITY;
            for (int t = to; t < TILE; t++) scores[g][t] = -INFINITY;
            float highest = peak[g], sum = 0.0f;
            for (int t = 0; t < TILE; t++) highest = scores[g][t] > highest ? scores[g][t] : highest;
            float before = exp_negative(peak[g] - highest);
#pragma omp simd reduction(+ : sum)
            for (int t = 0; t < TILE; t++) {
                scores[g][t] = exp_negative(scores[g][t] - highest);
                sum += scores[g][t];
            }
            total[g] = total[g] * before + sum;
            peak[g] = highest;
            for (int i = 0; i < whole; i++) acc[g][i] *= before;
            for (int i = 0; i < rest; i++) tail[g][i] *= before;
        }
        for (int t = from; t < to; t++) {
            const T *row = values + (start + t) * DIM;
            for (int i = 0; i < whole; i++) {
                vector value = load(row + i * LANES);
                for (int g = 0; g < group; g++) acc[g][i] += scores[g][t] * value;
            }
            for (int g = 0; g < group; g++)
                for (int i = 0; i < rest; i++) tail[g][i] += scores[g][t] * LOAD(row[whole * LANES + i]);
        }
    }
    for (int g = 0; g < group; g++) {
        float result[DIM_BOUND];
        memcpy(result, acc[g], whole * sizeof(vector));
        memcpy(result + whole * LANES, tail[g], rest * sizeof(float));
        for (int i = 0; i < DIM; i++) out[g * DIM + i] = STORE(result[i] / total[g]);
    }
}

#undef GROUP
#undef DIM
#undef DIM_BOUND
#undef NAMED
