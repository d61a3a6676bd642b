"""Every name of MiniStack's that this package uses, private ones included; nothing else imports it.

The fixes replace functions of MiniStack's modules and call others of them. Their names and shapes
are those of one version: where another version, or a name that is gone, would fail in the middle
of a deployment, importing this module fails first and lists what is missing. A test compares the
list with what the package uses, so that it neither lacks a name nor keeps an old one.
"""

import importlib
from importlib import metadata
from typing import Any

#: The version whose internals these are.
MINISTACK_VERSION = "1.5.33"

_missing: list[str] = []


class InternalsError(ImportError):
    """The installed MiniStack is not the one that this package was written for."""


def check_version() -> None:
    """Raises InternalsError: MiniStack is not installed, or in another version."""
    try:
        found = metadata.version("ministack")
    except metadata.PackageNotFoundError:
        found = "none"
    if found != MINISTACK_VERSION:
        raise InternalsError(
            f"rehearsal/ministack reaches into MiniStack {MINISTACK_VERSION}, and this Python "
            f"has {found}: run `make venv-aws`, or adapt rehearsal/ministack to the other version"
        )


def check_names() -> None:
    """Raises InternalsError: some of the names below are not in MiniStack; lists all of those."""
    if _missing:
        raise InternalsError(
            f"rehearsal/ministack was written for MiniStack {MINISTACK_VERSION}, and this one has "
            f"no {', '.join(_missing)}: run `make venv-aws`, or adapt the code that uses it"
        )


def _module(name: str, *names: str) -> Any:
    """A module of MiniStack's; notes which of ``names`` it lacks."""
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        _missing.append(str(error.name))
        return None
    _missing.extend(f"{name}.{each}" for each in names if not hasattr(module, each))
    return module


check_version()

# The server first: it imports the services in the order that they need.
app = _module(
    "ministack.app", "SERVICE_HANDLERS", "_dispatch_service_request", "_routing_params", "main"
)

concurrency = _module("ministack.core.concurrency", "resource_lock", "spawn_background")
iam_actions = _module(
    "ministack.core.iam_actions",
    "SERVICE_TO_IAM_NAMESPACE",
    "access_denied_response",
    "extract_iam_action",
    "extract_resource_arn",
    "s3_additional_checks",
)
iam_evaluator = _module(
    "ministack.core.iam_evaluator", "_resolve_managed_policy_document", "_resource_policy"
)
lambda_runtime = _module(
    "ministack.core.lambda_runtime", "execution_credentials", "invalidate_worker"
)
responses = _module("ministack.core.responses", "get_account_id", "get_region", "request_scope")
router = _module("ministack.core.router", "SERVICE_PATTERNS", "detect_service", "extract_region")

autoscaling = _module(
    "ministack.services.autoscaling", "_ACTION_MAP", "_asgs", "_error", "_p", "_xml"
)
cloudwatch_logs = _module(
    "ministack.services.cloudwatch_logs",
    "_compile_filter_pattern",
    "_create_log_stream",
    "_log_groups",
    "_put_log_events",
    "_resource_policies",
)
ec2 = _module(
    "ministack.services.ec2",
    "_addresses",
    "_allocate_address",
    "_create_flow_logs",
    "_create_nat_gateway",
    "_create_placement_group",
    "_delete_flow_logs",
    "_delete_nat_gateway",
    "_delete_placement_group",
    "_flow_logs",
    "_instances",
    "_launch_templates",
    "_lt_data_xml",
    "_nat_gateways",
    "_network_interfaces",
    "_placement_groups",
    "_release_address",
    "_rules_match",
    "_security_groups",
    "_sg_rule_id",
    "_subnets",
    "_tags",
    "_vpcs",
)
ecs = _module(
    "ministack.services.ecs",
    "_ACTION_MAP",
    "_ImagePullError",
    "_PRE_STOP_STATUSES",
    "_build_run_kwargs",
    "_capacity_providers",
    "_cleanup_task_resources",
    "_cluster_name_from_arn",
    "_clusters",
    "_create_capacity_provider",
    "_delete_capacity_provider",
    "_deployment_for_task",
    "_deployment_needs_first_task",
    "_describe_tasks",
    "_docker",
    "_iso",
    "_mark_task_pending",
    "_mark_task_running",
    "_mark_task_stopped",
    "_maybe_mark_stopped",
    "_prepare_service_images",
    "_put_cluster_capacity_providers",
    "_reconcile_service_tasks",
    "_record_service_task_failure",
    "_register_metadata",
    "_resolve_cluster_name",
    "_resolve_task",
    "_resolve_td_key",
    "_run_docker_container",
    "_sanitize",
    "_schedule_service_deployment_completion",
    "_services",
    "_stop_task",
    "_tags",
    "_task_defs",
    "_task_ip",
    "_task_is_active",
    "_tasks",
    "_watch_task_lifecycle",
    "json_response",
    "new_uuid",
)
eventbridge = _module(
    "ministack.services.eventbridge",
    "_invoke_target",
    "_now_ts",
    "_pattern_event_view",
    "_put_events",
    "new_uuid",
)
iam = _module(
    "ministack.services.iam",
    "_IAM_HANDLERS",
    "_create_oidc_provider",
    "_create_service_linked_role",
    "_delete_oidc_provider",
    "_error",
    "_oidc_providers",
    "_p",
    "_roles",
)
lambda_svc = _module(
    "ministack.services.lambda_svc", "_emit_lambda_logs", "_execute_function_with_config_scope"
)
s3 = _module("ministack.services.s3", "_bucket_tags", "_buckets", "_delete_bucket")
secretsmanager = _module("ministack.services.secretsmanager", "_secrets")
servicediscovery = _module(
    "ministack.services.servicediscovery",
    "_deregister_instance",
    "_namespaces",
    "_register_instance",
    "_services",
)
ssm = _module("ministack.services.ssm", "_PUBLIC_AMI_PARAMETERS")
stepfunctions = _module(
    "ministack.services.stepfunctions",
    "_ExecutionError",
    "_add_event",
    "_apply_jsonata_template",
    "_describe_execution",
    "_execute_task",
    "_fail_execution",
    "_invoke_resource",
    "_list_executions",
    "_pascal_to_camel",
    "_state_machines",
)
cloudformation = _module("ministack.services.cloudformation", "_stacks")
custom_resource = _module("ministack.services.cloudformation.custom_resource", "_lock", "_pending")
provisioners = _module(
    "ministack.services.cloudformation.provisioners",
    "_REPLACING_PROPERTIES",
    "_RESOURCE_HANDLERS",
    "_STACK_TAG_PROPERTY",
    "_cfn_bool",
    "_cw_metric_alarm_record",
    "_ec2_apply_tags",
    "_ec2_sg_permissions",
    "_normalize_container_defs",
    "_pascal_to_camel",
    "_physical_name",
    "_reconcile_tag_list",
    "_seeded_create",
    "_sm_secret_string",
    "_tag_map",
)
stacks = _module("ministack.services.cloudformation.stacks", "_extract_deps", "_topological_sort")

check_names()
