"""Late interaction: texts are compared token by token, after each was read alone.

Arrays of tokens come to the host, where a query's are read once for all of its documents.
"""

import numpy as np


def max_sim(query: np.ndarray, document: np.ndarray) -> float:
    """Returns the sum over a query's tokens, [n, X], of the largest product with one of a
    document's, [m, X]; of one array each, [X], their product. arXiv:2004.12832."""
    query, document = np.atleast_2d(query), np.atleast_2d(document)
    products = query.astype(np.float32) @ document.astype(np.float32).T
    return float(products.max(1).sum())
