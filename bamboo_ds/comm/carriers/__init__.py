"""The ways of messages' data to the other end of a connection: in its stream (:mod:`.stream`), or through memory
that both ends share (:mod:`.slabs`), on which they agree themselves (:mod:`.sharing`).

A channel's verbs come down to few here. What is sent or received goes in segments, and no carrier ever waits: where
one is not *ready* for a segment, the stream has place for it, or the kernel tells when it has. Messages are *drained*
when the other end has read the stream, in which each segment is marked; and an *aborted* epoch needs no word to a
carrier, since it ends between two segments.
"""
