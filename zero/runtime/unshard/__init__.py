"""Stage 3: weights are kept in shares, gathered before an operator uses them, and freed after.

How an operator gets a weight:
    1. A parameter without memory reaches an operator: `_dispatch` in ../params/absent.py asks the cache for its chunk
       (`GatheredWeights.acquire` in zero/memory/gathered.py), which often has it.
    2. Else `ShardedChunk.fetch` (exchange.py) takes the first of these that is possible:
         a. memory that all ranks of this host see, if nobody edited the chunk since the step
         b. an all-gather, if all ranks fetched this chunk in the same order in the last two windows (schedule.py, gathers.py)
         c. a read of each other rank's share, on its own (zero/comm/pulls.py)
    3. The cache frees the chunk whose next use is farthest away.

How a weight changes: edits of the user make a new version of a share (`ShareExchange.edit`, edits.py); a step compares the
edits of all ranks (`begin_step`), writes, and makes the new values everybody's (`end_step`).

Read weights.py first (what one rank keeps), then memory.py, exchange.py, schedule.py, gathers.py and edits.py.
"""
