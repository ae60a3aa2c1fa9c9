"""Classify lines of text by hashed n-grams, on one machine or several.

Run it alone, or on two processes of each of several machines, each of which reads its own part of
the lines. FILE has columns separated by tabs, named label and text:

    python examples/text_classifier.py FILE
    torchrun --nproc-per-node 2 examples/text_classifier.py FILE
    mpiexec -n 2 python examples/text_classifier.py FILE
"""

import sys

from sparcel.comm import world
from sparcel.linear import SparseLogisticRegression
from sparcel.rows import HashedNGrams, Text

comm = world()
rank, ranks = (0, 1) if comm is None else (comm.rank, comm.size)
words = HashedNGrams("word", (1, 2), dimensions=2**20)
rows = Text("tsv", words).read(sys.argv[1], rank, ranks)
model = SparseLogisticRegression(epochs=10, tol=None).fit(rows)
if rank == 0:
    print(f"after {model.n_iter_} epochs, mean loss {model.epochs_[-1].loss:.4f}")
    for line in ("cheap pills, buy now", "see you at lunch"):
        print(line, model.predict_proba(words.rows([line]))[0].round(3), sep="\t")
