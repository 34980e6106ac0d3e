"""The web page, the metrics and the API of a job, served by the agent of the member that leads.

=============================  ======================================================================================
``GET /``                      the page (:mod:`bamboo_ds.observe.web`, its ``{{nonce}}`` replaced); without a
                               cookie or a token the form to log in
``GET /api/view``              :class:`~bamboo_ds.observe.view.LiveView` as JSON
``GET /api/stream``            server-sent events. The data of each is a JSON object with *some* of the view's fields:
                               the first one has all, later ones those that have changed; so a client keeps
                               ``view = Object.assign(view, JSON.parse(event.data))``. A comment each 15 s
``GET /api/losses/NUMBER``     :class:`~bamboo_ds.observe.view.LossDetail`; 404 where it is not known any more
``GET /api/controls``          ``{"control": true|false}``: whether the two below are allowed
``POST /api/stop``             ends the job as ``bamboo stop`` does (403 unless ``observe.control``)
``POST /api/leave/MEMBER``     asks a member to leave, like a notice (the same; 404: no such member)
``GET /metrics``               Prometheus text; 503 while the events are read for the first time
``GET /healthz``               ``ok``; open to everybody
``GET /login, POST /login``    the form, and what it sends: field ``token``; sets the cookie, then 303 to ``/``
=============================  ======================================================================================

All but ``/healthz`` and ``/login`` need ``Authorization: Bearer TOKEN`` or the cookie: 401 without. Errors are JSON,
``{"error": "..."}``. Requests that change something need the header, or the cookie and this server as ``Origin``.

The token is derived from the job's secret and does not lead back to it: this is plain HTTP.
"""
