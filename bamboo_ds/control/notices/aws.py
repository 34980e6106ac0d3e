"""AWS: spot interruption notices and rebalance recommendations of the instance metadata service, version 2.

https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import AwareDatetime, BaseModel, Field

from .notice import Notice, NoticeSource, seconds_until
from .transport import Answer, SourceBroken, request

if TYPE_CHECKING:
    import aiohttp

AWS_URL = "http://169.254.169.254"

_TOKEN = "/latest/api/token"
_ACTION = "/latest/meta-data/spot/instance-action"
_REBALANCE = "/latest/meta-data/events/recommendations/rebalance"
#: The longest life of a token that AWS grants, in seconds.
_TOKEN_TTL_S = 21600


class _InstanceAction(BaseModel):
    action: str
    time: AwareDatetime


class _Recommendation(BaseModel):
    notice_time: AwareDatetime = Field(alias="noticeTime")


class AwsSource(NoticeSource):
    """Asks the metadata service of an EC2 instance.

    Args:
        base_url: URL of the service, without a path.
    """

    name = "aws"

    def __init__(self, base_url: str = AWS_URL) -> None:
        self.where = base_url
        self._token: str | None = None  # a new one is fetched when the service refuses it

    async def poll(self, session: aiohttp.ClientSession) -> Notice | None:
        answer = (await self._get(session, _ACTION)).expect(200, 404)
        if answer.status == 200:
            found = answer.parse(_InstanceAction)
            # Hibernation begins with the notice.
            left_s = 0.0 if found.action == "hibernate" else seconds_until(found.time, answer.now)
            what = f"spot instance-action {found.action} at {found.time.isoformat()}"
            return Notice("preempt", self.name, what, left_s, key=what)
        answer = (await self._get(session, _REBALANCE)).expect(200, 404)
        if answer.status == 200:
            what = f"rebalance recommendation of {answer.parse(_Recommendation).notice_time.isoformat()}"
            return Notice("rebalance", self.name, what, None, vanishes=False, key=what)
        return None

    async def _get(self, session: aiohttp.ClientSession, path: str) -> Answer:
        fresh = self._token is None
        if self._token is None:
            self._token = await self._fetch_token(session)
        headers = {"X-aws-ec2-metadata-token": self._token}
        answer = await request(session, "GET", self.where + path, headers=headers)
        if answer.status != 401:
            return answer
        self._token = None
        if fresh:
            raise SourceBroken(f"{answer.url} refuses a token that {_TOKEN} has just issued")
        return await self._get(session, path)

    async def _fetch_token(self, session: aiohttp.ClientSession) -> str:
        headers = {"X-aws-ec2-metadata-token-ttl-seconds": str(_TOKEN_TTL_S)}
        answer = (await request(session, "PUT", self.where + _TOKEN, headers=headers)).expect(200)
        token = answer.text
        if not token.isascii() or not token.isprintable() or not token:
            raise SourceBroken(f"{answer.url} answered something that is no token: {answer.body[:80]!r}")
        return token
