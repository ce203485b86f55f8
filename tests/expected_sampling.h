/* Written by make_sampling.py: what samplers must choose, by their definitions. */
typedef struct sampling_case {
    uint32_t n, n_draws;
    double scale;
    rf_sampler_desc desc;
    int32_t first[12];
    uint64_t hash; /* of all tokens: h = h * 31 + token */
    double mu, logprob; /* mirostat's at the end; sum of the chosen */
} sampling_case;

static const rf_dry_breaker sampling_breakers[] = {{1, {1}}, {2, {3, 0}}, {3, {3, 0, 2}}};

static const sampling_case sampling_cases[] = {
    {300, 200, 128, {.temperature = 1, .xtc_probability = 1, .xtc_threshold = 0.01f, .seed = 1},
     {103, 105, 262, 215, 279, 212, 39, 71, 76, 187, 174, 151}, 994177427422116210u, 10, -1103.92410985},
    {40, 200, 256, {.temperature = 0.7f, .top_k = 20, .top_p = 0.9f, .min_p = 0.05f, .xtc_probability = 0.5f, .seed = 2},
     {33, 19, 25, 37, 29, 1, 39, 5, 30, 35, 33, 12}, 2396139154899096187u, 10, -570.114113319},
    {8, 200, INFINITY, {.temperature = 1, .xtc_probability = 0.5f, .seed = 3},
     {7, 7, 7, 7, 7, 1, 3, 7, 7, 7, 7, 0}, 9027999568975066013u, 10, -415.888308336},
    {6, 200, 512, {.temperature = 0.3f, .dry_multiplier = 0.8f, .seed = 4},
     {2, 0, 4, 5, 2, 1, 0, 4, 3, 2, 0, 1}, 17818386654206636925u, 10, -282.03664243},
    {6, 200, 512, {.dry_multiplier = 2, .dry_base = 1.2f, .dry_allowed_length = 1, .seed = 5},
     {1, 0, 4, 3, 2, 0, 0, 5, 3, 3, 0, 1}, 16587779677780976916u, 10, -258.97804868},
    {5, 200, 256, {.temperature = 0.5f, .dry_multiplier = 1.5f, .dry_breakers = sampling_breakers, .n_dry_breakers = 3, .seed = 6},
     {1, 0, 4, 4, 2, 0, 0, 4, 3, 2, 0, 1}, 55483040132230558u, 10, -177.391447388},
    {12, 900, 256, {.temperature = 0.4f, .dry_multiplier = 1, .dry_last_n = 700, .n_history = 1000, .repeat_penalty = 1.3f, .penalty_last_n = 500, .frequency_penalty = 0.01f, .presence_penalty = 0.1f, .seed = 7},
     {7, 0, 4, 10, 2, 9, 8, 5, 9, 3, 7, 6}, 14936302760784037545u, 10, -1625.09807578},
    {400, 200, 128, {.temperature = 1, .mirostat = 1, .seed = 8},
     {205, 53, 262, 234, 246, 363, 203, 367, 240, 377, 396, 170}, 14014628611182671061u, 8.43214215041, -847.447272345},
    {1000, 200, 64, {.temperature = 0.8f, .mirostat = 1, .mirostat_tau = 3, .mirostat_eta = 0.2f, .seed = 9},
     {765, 823, 881, 939, 997, 46, 658, 927, 794, 278, 501, 394}, 10513800907292543025u, 9.4916372794, -863.367051096},
    {400, 200, 128, {.temperature = 1, .mirostat = 2, .seed = 10},
     {60, 368, 4, 10, 364, 218, 190, 17, 240, 127, 107, 170}, 18159515379930334341u, 6.53997989392, -852.134772345},
    {1000, 200, 64, {.temperature = 1.3f, .mirostat = 2, .mirostat_tau = 2, .mirostat_eta = 0.3f, .seed = 11},
     {765, 823, 881, 939, 997, 633, 104, 162, 220, 410, 336, 737}, 3674287873322300113u, 6.02711091485, -843.773301096},
};
