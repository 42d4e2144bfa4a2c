import os

# Before torch is imported, for the processes that tests start as well: the models are tiny, and threads that wait
# for each other on two cores cost ten times what they bring.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MPLBACKEND", "agg")
