"""Redis' users as a template of the chart: written once, in penstock.base.redis_roles.

python -m deploy.chart_redis_roles      # writes deploy/helm/templates/_redis_roles.tpl
"""

import json
from pathlib import Path

from penstock.base.redis_roles import ROLES, acl_rules, user_of

TARGET = Path(__file__).parent / "helm" / "templates" / "_redis_roles.tpl"
HEAD = """{{/* Redis' user of each role and its ACL rules, generated from penstock.base.redis_roles by `python -m \
deploy.chart_redis_roles`; use fromJson. */}}

{{- define "penstock.redisRoles" -}}
"""


def render() -> str:
    found = {role: {"user": user_of(role), "rules": acl_rules(role)} for role in ROLES}
    return f"{HEAD}{json.dumps(found, indent=1)}\n{{{{- end }}}}\n"


if __name__ == "__main__":
    TARGET.write_text(render(), encoding="utf-8")
