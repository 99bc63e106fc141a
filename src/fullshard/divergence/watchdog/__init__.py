"""The watchdog: a thread per process that finds out why ranks wait, and ends waits that cannot succeed.

    observation   where this rank is
    probes        whether the other processes of this host run
    store_client  the store, which may block, in a thread of its own
    rounds        one rank asks, all answer, through the store
    judge         what the answers mean
    silences      for how long ranks have not answered
    alone         what a rank concludes without the store
    release       brings a blocked thread back
    peers         the other ranks on this host
    last_words    what they tell each other without the store before they end
    stalls        what is noted and printed about slow ranks
    thread        when to ask, and what to do with a judgement
    process       starts it once for a process
    process_end   what a process says before it ends

The verdict is in `divergence.verdict`, where waits look at it.
"""

from fullshard.divergence.watchdog.process import find_peers, introduce, start
from fullshard.divergence.watchdog.stalls import Stall, stalls

__all__ = ["Stall", "find_peers", "introduce", "stalls", "start"]
