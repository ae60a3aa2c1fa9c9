"""Analysis of sparse training: the fill-in of sums, and the similarity of ranks.

Before training, `expected_nnz` and related functions give the density of a sum if ranks choose
independently. `fill_in` measures it on gradients, and `plot_fill_in` draws it.

During training, diagnostics tell whether the ranks' memories and selections are as similar as
ScaleCom's convergence requires, and compute Ok-Topk's ξ.
"""

from sparcel.tools.analysis.density import (
    Growth,
    delta,
    expected_nnz,
    fill_in,
    gradients_of,
    growth,
    nnz_variance,
    ranks_until_dense,
    relative_volume,
)
from sparcel.tools.analysis.diagnostics import (
    contraction,
    contraction_bound,
    cosine_similarities,
    hamming_distance,
    normalized_hamming_distance,
    quantile_agreement,
    spearman,
    xi,
)
from sparcel.tools.analysis.report import plot_fill_in

__all__ = [
    "Growth",
    "contraction",
    "contraction_bound",
    "cosine_similarities",
    "delta",
    "expected_nnz",
    "fill_in",
    "gradients_of",
    "growth",
    "hamming_distance",
    "nnz_variance",
    "normalized_hamming_distance",
    "plot_fill_in",
    "quantile_agreement",
    "ranks_until_dense",
    "relative_volume",
    "spearman",
    "xi",
]
