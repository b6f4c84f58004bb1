"""More machines than one on a side: one party's own cluster, run by Ray.

Nothing here knows the other party's cluster. What passes between the parties goes through the
sessions that there are without a cluster; what passes between machines of one party stays within
its trust domain. Ray is an optional dependency: only this folder imports it.
"""
