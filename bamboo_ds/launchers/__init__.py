"""Begin and end of a job on a host: started by a user, or by another launcher rank by rank.

* :mod:`.run`: ``bamboo run``, one agent per slot; :mod:`.wrap`: ``bamboo launch``, around another launcher;
  :mod:`.join`: ``bamboo join``, one agent more for a job that runs.
* :mod:`.launched`: a rank that another launcher has started agrees with the others (:mod:`.meeting`) and becomes the
  supervisor of its slot (:mod:`.supervisor`).
* :mod:`.slots`: agents as the children of one of these; :mod:`.joined`: members that none of them has started.
"""
