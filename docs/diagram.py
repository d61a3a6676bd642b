"""Draw docs/images/architecture.svg from the synthesized templates.

    make synth && python docs/diagram.py cdk.out > docs/images/architecture.svg

Every resource type of the templates is either drawn or listed below with the reason why not; any
other ends the script, so that the picture cannot fall behind the stacks unnoticed.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, Final

Template = Mapping[str, Any]

DRAWN: Final = frozenset(
    {
        "AWS::AutoScaling::AutoScalingGroup",
        "AWS::CloudWatch::Alarm",
        "AWS::CloudWatch::Dashboard",
        "AWS::EC2::LaunchTemplate",
        "AWS::EC2::NatGateway",
        "AWS::EC2::PlacementGroup",
        "AWS::EC2::Subnet",
        "AWS::EC2::VPC",
        "AWS::EC2::VPCEndpoint",
        "AWS::ECR::Repository",
        "AWS::ECS::CapacityProvider",
        "AWS::ECS::Cluster",
        "AWS::ECS::Service",
        "AWS::ECS::TaskDefinition",
        "AWS::Events::Rule",
        "AWS::IAM::OIDCProvider",
        "AWS::Lambda::Function",
        "AWS::Logs::LogGroup",
        "AWS::S3::Bucket",
        "AWS::SNS::Topic",
        "AWS::SecretsManager::Secret",
        "AWS::ServiceDiscovery::PrivateDnsNamespace",
        "AWS::ServiceDiscovery::Service",
        "AWS::StepFunctions::StateMachine",
    }
)

_WIRING: Final = "belongs to something drawn"
_RIGHTS: Final = "rights are in docs/security.md"
LEFT_OUT: Final[Mapping[str, str]] = {
    "AWS::EC2::EIP": "the NAT gateway's address",
    "AWS::EC2::FlowLog": "records the VPC's traffic in one of the log groups",
    "AWS::EC2::InternetGateway": "behind the NAT gateway",
    "AWS::EC2::Route": _WIRING,
    "AWS::EC2::RouteTable": _WIRING,
    "AWS::EC2::SecurityGroup": _RIGHTS,
    "AWS::EC2::SecurityGroupEgress": _RIGHTS,
    "AWS::EC2::SecurityGroupIngress": _RIGHTS,
    "AWS::EC2::SubnetRouteTableAssociation": _WIRING,
    "AWS::EC2::VPCGatewayAttachment": _WIRING,
    "AWS::ECS::ClusterCapacityProviderAssociations": _WIRING,
    "AWS::IAM::InstanceProfile": _RIGHTS,
    "AWS::IAM::Policy": _RIGHTS,
    "AWS::IAM::Role": _RIGHTS,
    "AWS::Lambda::Permission": _RIGHTS,
    "AWS::Logs::MetricFilter": "counts failed tasks for the alarm",
    "AWS::Logs::ResourcePolicy": _RIGHTS,
    "AWS::S3::BucketPolicy": _RIGHTS,
    "AWS::SNS::Subscription": "the topic's one reader",
    "AWS::SNS::TopicPolicy": _RIGHTS,
    "Custom::S3AutoDeleteObjects": "its function is counted",
    "Custom::StopTasks": "in the teardown box",
    "Custom::TerminateHosts": "in the teardown box",
    "Custom::VpcRestrictDefaultSG": "its function is counted",
}

WIDTH: Final = 1200
HEIGHT: Final = 810
# The deployment lies below the laptop.
TOP: Final = 110
# Where the three columns begin.
LEFT, MIDDLE, RIGHT = 24, 300, 900
STYLE: Final = """
svg { --page: #fbfcfd; --area: #f3f7fb; --edge: #b9c7d4; --box: #fff; --ink: #1d2733;
  --muted: #50606f; --blue: #1d5fa9; --orange: #bd540a }
@media (prefers-color-scheme: dark) { svg { --page: #0f1319; --area: #171d26; --edge: #3a4657;
  --box: #1f2733; --ink: #e7ebf1; --muted: #a9b4c2; --blue: #6fb1f6; --orange: #f4a261 } }
text { font: 13px system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif; fill: var(--ink) }
.title { font-weight: 600 } .small { font-size: 12px; fill: var(--muted) }
.stack { font-size: 12px; font-weight: 600; fill: var(--muted); letter-spacing: .04em }
.page { fill: var(--page) } .box { fill: var(--box); stroke: var(--edge); rx: 6 }
.area { fill: var(--area); stroke: var(--edge); rx: 8 } .you { stroke: var(--ink); stroke-width: 2 }
.core { stroke: var(--blue); stroke-width: 1.5 }
.training { stroke: var(--orange); stroke-width: 1.5; stroke-dasharray: 6 2 }
.line { stroke: var(--muted); stroke-width: 1.3; fill: none; marker-end: url(#end) }
.end { fill: var(--muted) }
"""


class Resources:
    """The resources of both templates, by type."""

    def __init__(self, *templates: Template) -> None:
        self._by_type: dict[str, dict[str, Any]] = {}
        for template in templates:
            for name, resource in template["Resources"].items():
                kind = self._by_type.setdefault(resource["Type"], {})
                kind[name] = resource.get("Properties", {})
        unknown = sorted(self._by_type.keys() - DRAWN - LEFT_OUT.keys())
        if unknown:
            raise SystemExit(
                f"docs/diagram.py does not know {', '.join(unknown)}: draw it, or say in LEFT_OUT "
                "why not"
            )

    def all(self, kind: str) -> list[dict[str, Any]]:
        assert kind in DRAWN, kind
        return [*self._by_type.get(kind, {}).values()]

    def only(self, kind: str) -> dict[str, Any]:
        (found,) = self.all(kind)
        return found

    def of_node(self, kind: str, node: str) -> dict[str, Any]:
        """The one resource of a type that belongs to the heads or the workers."""
        assert kind in DRAWN, kind
        (found,) = [value for name, value in self._by_type[kind].items() if node in name]
        return dict(found)


def box(x: int, y: int, width: int, lines: Sequence[str], style: str, height: int = 0) -> str:
    """A box whose first line is its title.

    Raises:
        ValueError: a line is wider than the box in the widest of the fonts, about 6.4 px a letter.
    """
    if wide := [line for line in lines if 6.4 * len(line) > width - 12]:
        raise ValueError(f"wider than {width} px: {wide}")
    height = height or 24 + 18 * len(lines)
    parts = [f'<rect class="box {style}" x="{x}" y="{y}" width="{width}" height="{height}"/>']
    for number, line in enumerate(lines):
        css = "title" if not number else "small"
        parts.append(
            f'<text class="{css}" x="{x + 12}" y="{y + 24 + 18 * number}">{escape(line)}</text>'
        )
    return "\n".join(parts)


def area(x: int, y: int, width: int, height: int, title: str) -> str:
    return (
        f'<rect class="area" x="{x}" y="{y}" width="{width}" height="{height}"/>\n'
        f'<text class="stack" x="{x + 12}" y="{y + 20}">{escape(title)}</text>'
    )


def arrow(points: Sequence[tuple[int, int]], label: str = "", at: tuple[int, int] = (0, 0)) -> str:
    path = " ".join(f"{'L' if number else 'M'}{x} {y}" for number, (x, y) in enumerate(points))
    text = f'<text class="small" x="{at[0]}" y="{at[1]}">{escape(label)}</text>' if label else ""
    return f'<path class="line" d="{path}"/>{text}'


def count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def hosts(resources: Resources, node: str) -> list[str]:
    """Lines on one group of hosts."""
    data = resources.of_node("AWS::EC2::LaunchTemplate", node)["LaunchTemplateData"]
    group = resources.of_node("AWS::AutoScaling::AutoScalingGroup", node)
    disk = data["BlockDeviceMappings"][0]["Ebs"]
    market = data.get("InstanceMarketOptions", {}).get("MarketType", "on demand")
    together = "in the placement group" if "Placement" in data else "in no placement group"
    return [
        f"{node} hosts",
        f"{group['MinSize']} to {group['MaxSize']} x {data['InstanceType']}, {market}",
        together,
        f"disk {disk['VolumeSize']} GiB, {disk['Throughput']} MiB/s, encrypted",
    ]


def task(resources: Resources, node: str) -> list[str]:
    """Lines on one kind of node."""
    definition = resources.of_node("AWS::ECS::TaskDefinition", node)
    (container,) = definition["ContainerDefinitions"]
    service = resources.of_node("AWS::ECS::Service", node)
    gpus = sum(int(each["Value"]) for each in container.get("ResourceRequirements", []))
    return [
        f"{node} task: the whole host",
        f"{count(gpus, 'GPU')}, {container['Cpu'] / 1024:.1f} CPUs, "
        f"{container['Memory'] / 1024:.1f} GiB",
        f"{container['LinuxParameters']['SharedMemorySize'] / 1024:.1f} GiB of it shared memory",
        f"service: {service['DesiredCount']} tasks after a deploy",
    ]


def draw(core: Template, training: Template) -> str:
    """The picture of one deployment as SVG."""
    found = Resources(core, training)
    assert len(found.all("AWS::EC2::NatGateway")) == 1
    assert len(found.all("AWS::ECS::Cluster")) == len(found.all("AWS::EC2::PlacementGroup")) == 1
    assert len(found.all("AWS::ECS::CapacityProvider")) == 2
    pushes = bool(found.all("AWS::IAM::OIDCProvider")) or "ImagePushRoleArn" in core["Outputs"]
    parts = [*_network(found), *_beside_it(found, pushes=pushes), *_around_it(found)]
    endpoints = found.all("AWS::EC2::VPCEndpoint")
    interfaces = sum(each["VpcEndpointType"] == "Interface" for each in endpoints)
    if interfaces:
        parts.append(
            f'<text class="small" x="{MIDDLE + 12}" y="186">'
            f"{count(interfaces, 'interface endpoint')}: ECR, Logs, SSM</text>"
        )
    parts.append(
        f'<rect class="box core" x="{RIGHT}" y="632" width="16" height="16"/>'
        f'<text class="small" x="{RIGHT + 24}" y="645">CoreStack: stays</text>'
        f'<rect class="box training" x="{RIGHT}" y="660" width="16" height="16"/>'
        f'<text class="small" x="{RIGHT + 24}" y="673">TrainingStack (dashed): may be rebuilt '
        "daily</text>"
    )
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">\n'
        "<title>What the two stacks deploy, and how a laptop uses it</title>\n"
        f"<style>{STYLE}</style>\n"
        '<defs><marker id="end" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" '
        'markerHeight="8" orient="auto"><path class="end" d="M0 0 L8 4 L0 8 z"/></marker></defs>\n'
        f'<rect class="page" width="{WIDTH}" height="{HEIGHT}"/>\n'
        '<text class="title" x="24" y="32">Two stacks: what is deployed, and what it may grow to'
        "</text>\n"
        + "\n".join(_laptop())
        + f'\n<g transform="translate(0 {TOP})">\n{body}\n</g>\n</svg>\n'
    )


def _laptop() -> list[str]:
    """The row at the top: who uses all of it, and what for."""
    bottom = 110
    return [
        box(
            LEFT,
            bottom - 60,
            WIDTH - 2 * LEFT,
            [
                "You, on a laptop: trainctl and make",
                "no GPU, no torch; it may be closed while jobs run, and shows logs, results and "
                "costs when it is back",
            ],
            "you",
        ),
        arrow([(134, bottom), (134, TOP + 79)], "data put, download", (142, 136)),
        arrow(
            [(MIDDLE + 143, bottom), (MIDDLE + 143, TOP + 45)],
            "shell, open: a tunnel by SSM, no open port",
            (MIDDLE + 151, 136),
        ),
        arrow([(1038, bottom), (1038, TOP + 79)], "submit, stop", (1046, 136)),
    ]


def _network(found: Resources) -> list[str]:
    """The middle: the VPC, and in it hosts and tasks."""
    vpc, nat, subnet = (
        found.only("AWS::EC2::VPC"),
        found.of_node("AWS::EC2::Subnet", "Nat"),
        found.of_node("AWS::EC2::Subnet", "Training"),
    )
    namespace, name = _address(found)
    return [
        area(MIDDLE - 20, 50, 596, 560, f"VPC {vpc['CidrBlock']}, one zone"),
        area(MIDDLE, 84, 556, 78, f"public subnet {nat['CidrBlock']}"),
        box(MIDDLE + 380, 98, 160, ["NAT gateway", "the only way out"], "core", 54),
        area(MIDDLE, 236, 556, 356, f"private training subnet {subnet['CidrBlock']}"),
        box(MIDDLE + 16, 272, 254, hosts(found, "Head"), "training"),
        box(MIDDLE + 286, 272, 254, hosts(found, "Worker"), "training"),
        box(MIDDLE + 16, 406, 254, task(found, "Head"), "training"),
        box(MIDDLE + 286, 406, 254, task(found, "Worker"), "training"),
        arrow([(MIDDLE + 143, 406), (MIDDLE + 143, 374)], "runs on", (MIDDLE + 152, 394)),
        arrow([(MIDDLE + 413, 406), (MIDDLE + 413, 374)], "runs on", (MIDDLE + 422, 394)),
        arrow([(MIDDLE + 286, 440), (MIDDLE + 271, 440)]),
        arrow([(MIDDLE + 460, 236), (MIDDLE + 460, 154)], "HTTPS", (MIDDLE + 468, 204)),
        f'<text class="small" x="{MIDDLE + 16}" y="{536}">Workers join the head at '
        f"{escape(name)}.{escape(namespace)}; everything among the nodes</text>",
        f'<text class="small" x="{MIDDLE + 16}" y="{554}">is allowed, nothing is from outside. '
        "Each group has a capacity provider,</text>",
        f'<text class="small" x="{MIDDLE + 16}" y="{572}">which starts a host when a task waits '
        "for one.</text>",
    ]


def _beside_it(found: Resources, *, pushes: bool) -> list[str]:
    """The left column: what nodes read and write."""
    bucket = found.only("AWS::S3::Bucket")
    rules = bucket["LifecycleConfiguration"]["Rules"]
    ages = [
        f"{what} after {days} days"
        for what, days in [
            *(("archived", t["TransitionInDays"]) for r in rules for t in r.get("Transitions", [])),
            *(("deleted", r["ExpirationInDays"]) for r in rules if "ExpirationInDays" in r),
        ]
    ]
    namespace, name = _address(found)
    return [
        box(LEFT, 84, 220, ["Bucket", "data, checkpoints, records", *ages], "core"),
        arrow([(MIDDLE, 250), (250, 250), (250, 130), (245, 130)]),
        f'<text class="small" x="{LEFT}" y="232">by the S3 gateway endpoint</text>',
        box(
            LEFT,
            272,
            220,
            [
                "Image repositories",
                *(
                    f"{each}: immutable tags"
                    for each in ("head", "worker")[: len(found.all("AWS::ECR::Repository"))]
                ),
                "pushed by one GitHub branch" if pushes else "pushed by hand or CI",
            ],
            "core",
        ),
        arrow([(MIDDLE + 15, 320), (245, 320)]),
        box(LEFT, 406, 220, ["DNS namespace", namespace, f"{name}: the head's address"], "core"),
        arrow([(MIDDLE + 15, 450), (245, 450)]),
        box(
            LEFT,
            512,
            220,
            [
                "Token of Ray",
                count(len(found.all("AWS::SecretsManager::Secret")), "secret"),
                "read when a task starts",
            ],
            "training",
        ),
        arrow([(MIDDLE + 100, 505), (MIDDLE + 100, 514), (270, 514), (270, 548), (245, 548)]),
    ]


def _around_it(found: Resources) -> list[str]:
    """The right column: what watches, starts and ends them."""
    topic = bool(found.all("AWS::SNS::Topic"))
    functions = len(found.all("AWS::Lambda::Function"))
    return [
        box(
            RIGHT,
            84,
            276,
            [
                "Jobs",
                count(len(found.all("AWS::StepFunctions::StateMachine")), "state machine")
                + ", starts the head task",
                "a function cleans up after each job",
                "and looks for what escaped",
            ],
            "training",
        ),
        arrow([(RIGHT, 130), (MIDDLE + 581, 130)]),
        box(
            RIGHT,
            208,
            276,
            [
                "Logs",
                count(len(found.all("AWS::Logs::LogGroup")), "log group"),
                "nodes, tasks, traffic, functions",
            ],
            "training",
        ),
        arrow([(MIDDLE + 556, 250), (RIGHT - 5, 250)]),
        box(
            RIGHT,
            314,
            276,
            [
                "Dashboard",
                count(len(found.all("AWS::CloudWatch::Dashboard")), "dashboard")
                + " of all hosts and GPUs",
                count(len(found.all("AWS::CloudWatch::Alarm")), "alarm")
                + (", sent by e-mail" if topic else ", on the dashboard"),
            ],
            "training",
        ),
        box(
            RIGHT,
            420,
            276,
            [
                "Task events",
                count(len(found.all("AWS::Events::Rule")), "rule"),
                "why a task stopped; counts failures",
            ],
            "training",
        ),
        box(
            RIGHT,
            526,
            276,
            [
                "Teardown",
                count(functions - 1, "function") + " for custom resources",
                "end tasks and hosts before a destroy",
            ],
            "training",
        ),
        arrow([(RIGHT, 562), (MIDDLE + 561, 562)]),
    ]


def _address(found: Resources) -> tuple[str, str]:
    """Domain of the nodes, and the head's name in it."""
    namespace = found.only("AWS::ServiceDiscovery::PrivateDnsNamespace")["Name"]
    return namespace, found.only("AWS::ServiceDiscovery::Service")["Name"]


def main() -> int:
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    folder = Path(sys.argv[1])
    core, training = (
        json.loads((folder / f"{name}.template.json").read_text())
        for name in ("CoreStack", "TrainingStack")
    )
    sys.stdout.write(draw(core, training))
    return 0


if __name__ == "__main__":
    sys.exit(main())
