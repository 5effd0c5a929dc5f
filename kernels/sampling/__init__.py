"""Choosing the next token of a row: a pure function of (logits, parameters, seed, choice, index).

Greedy (temperature 0): argmax, ties to the lowest id. Otherwise, with x = logits / temperature in fp32
(larger than the largest finite number counts as that, NaN as -inf) and the order "x descending, id
ascending":

1. top_k keeps the first k of the order;
2. of the masses exp(x - max x), top_p keeps the shortest prefix of what is left whose sum reaches top_p *
   the sum of all that is left, at least one token;
3. min_p keeps ids whose mass is at least min_p (the mass of the best is 1);
4. the token is the argmax of x[id] + g(id) over the kept ids, ties to the lowest id, where
   bits = Philox4x32-10(key = (seed lo, seed hi), counter = (id >> 2, index lo, choice, 0))[id & 3],
   u = min((float(bits) + 0.5) * 2**-32, 1 - 2**-24) and g = -log(-log1p(-u)), in fp32.

Adding Gumbel noise and taking the argmax draws from softmax(x) over the kept ids (Gumbel-max trick). No
generator state exists, so a draw can be repeated anywhere. A row whose logits are all -inf gives id 0.
Philox: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""
