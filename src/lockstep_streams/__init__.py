"""Data sets whose images lie in shards, in a folder or an object store: servers, cache, index, tar, parquet, MDS."""
