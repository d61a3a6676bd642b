"""What the templates say, where the value itself is what matters."""

from typing import Any, Final

import pytest

from contract.nodes import CACHE_DIR, CONTAINER
from tests.stacks.conftest import OPTIONS, OTHERS, PRESETS, Synth, Templates, text

TAGS: Final = [{"Key": "project", "Value": "ecs-train"}]
RESERVED: Final = {
    "preset": "fsdp",
    "worker_instance_type": "p5e.48xlarge",
    "head_instance_type": "m6i.xlarge",
    "head_trains": "false",
    "capacity_reservation_id": "cr-0123456789abcdef0",
    "max_workers": "1",
}
#: Of a file system.
PERSISTENT: Final = {
    "fsx_deployment": "persistent",
    "fsx_capacity_gib": "4800",
    "fsx_mbps_per_tib": "500",
    "fsx_on_destroy": "delete",
}
SETTINGS: Final[dict[str, dict[str, str]]] = {
    "default": {},
    "metal": {"worker_instance_type": "g4dn.metal"},
    "options": OPTIONS,
    "others": OTHERS,
    "block": RESERVED | {"capacity_reservation_type": "block"},
    "reserved": RESERVED | {"capacity_reservation_type": "on-demand"},
    "fsx": {"shared_storage": "fsx"},
    "persistent": PERSISTENT | {"shared_storage": "fsx"},
    **{name: {"preset": name} for name in PRESETS},
}
GROUP: Final = "<ClusterPlacement0167579F.GroupName>"
NODES: Final = "<ClusterSecurityGroup0921994B.GroupId>"
TRAINING_ROUTES: Final = "<VpcTrainingSubnet1RouteTable61C2EC54>"
TRAINING_SUBNET: Final = "<CoreStack:ExportsOutputRefVpcTrainingSubnet1Subnet9EBCF9C17753CDF6>"
TOKEN: Final = "<NodesRayTokenEAB20A0A>"

# Sentence -> settings, separated by spaces -> type and part of the name of resources -> value of
# each property. References stand in angle brackets, ``*`` for each entry of a list, ``@`` before an
# attribute of the resource; None: it is not there. ``@number``: of such resources, else any but 0.
FACTS: Final[dict[str, dict[str, dict[str, dict[str, object]]]]] = {
    # --- hosts
    "volumes are encrypted and go with their hosts": {
        "default options": {
            "EC2::LaunchTemplate": {
                "LaunchTemplateData.BlockDeviceMappings.*.Ebs.Encrypted": [True],
                "LaunchTemplateData.BlockDeviceMappings.*.Ebs.VolumeType": ["gp3"],
                "LaunchTemplateData.BlockDeviceMappings.*.Ebs.DeleteOnTermination": [True],
            }
        }
    },
    "the volume can be made larger": {
        "options": {
            "EC2::LaunchTemplate Worker": {
                "LaunchTemplateData.BlockDeviceMappings.*.Ebs.VolumeSize": [500]
            }
        }
    },
    "metadata needs a token and stays on the host unless spot notices must be read": {
        "default options": {
            "EC2::LaunchTemplate": {"LaunchTemplateData.MetadataOptions.HttpTokens": "required"}
        },
        "default": {
            "EC2::LaunchTemplate": {"LaunchTemplateData.MetadataOptions.HttpPutResponseHopLimit": 1}
        },
        "options": {
            "EC2::LaunchTemplate Worker": {
                "LaunchTemplateData.MetadataOptions.HttpPutResponseHopLimit": 2
            }
        },
    },
    "spot is for workers and never for heads": {
        "default": {"EC2::LaunchTemplate": {"LaunchTemplateData.InstanceMarketOptions": None}},
        "options": {
            "EC2::LaunchTemplate Worker": {
                "LaunchTemplateData.InstanceMarketOptions": {
                    "MarketType": "spot",
                    "SpotOptions": {
                        "InstanceInterruptionBehavior": "terminate",
                        "SpotInstanceType": "one-time",
                    },
                }
            },
            "EC2::LaunchTemplate Head": {"LaunchTemplateData.InstanceMarketOptions": None},
        },
    },
    "hosts start in reserved capacity and in no placement group": {
        "block reserved": {
            "EC2::PlacementGroup": {"@number": 0},
            "EC2::LaunchTemplate": {"LaunchTemplateData.Placement": None},
            "EC2::LaunchTemplate Head": {
                "LaunchTemplateData.CapacityReservationSpecification": None
            },
            "EC2::LaunchTemplate Worker": {
                "LaunchTemplateData.CapacityReservationSpecification": {
                    "CapacityReservationTarget": {"CapacityReservationId": "cr-0123456789abcdef0"}
                }
            },
        },
        "block": {
            "EC2::LaunchTemplate Worker": {
                "LaunchTemplateData.InstanceMarketOptions": {"MarketType": "capacity-block"}
            }
        },
        "reserved": {
            "EC2::LaunchTemplate Worker": {"LaunchTemplateData.InstanceMarketOptions": None}
        },
    },
    "workers share a cluster placement group with a head that trains": {
        "ddp fsdp": {
            "EC2::PlacementGroup": {"Strategy": "cluster", "@number": 1},
            "EC2::LaunchTemplate Worker": {"LaunchTemplateData.Placement.GroupName": GROUP},
        },
        "ddp": {"EC2::LaunchTemplate Head": {"LaunchTemplateData.Placement": None}},
        "fsdp": {"EC2::LaunchTemplate Head": {"LaunchTemplateData.Placement.GroupName": GROUP}},
    },
    "no host runs after a deploy, running ones are not touched, and scale-in takes none in use": {
        "ddp fsdp cpu": {
            "AutoScaling::AutoScalingGroup": {
                "MinSize": "0",
                "DesiredCapacity": None,
                "VPCZoneIdentifier": [TRAINING_SUBNET],
                # That these do not hold up `cdk destroy` is TerminateHosts' work.
                "NewInstancesProtectedFromScaleIn": True,
            },
            "AutoScaling::AutoScalingGroup Head": {"MaxSize": "1"},
            "ECS::CapacityProvider": {
                "AutoScalingGroupProvider.ManagedTerminationProtection": "ENABLED"
            },
        },
        "ddp cpu": {"AutoScaling::AutoScalingGroup Worker": {"MaxSize": "2"}},
        "fsdp": {"AutoScaling::AutoScalingGroup Worker": {"MaxSize": "1"}},
        "options": {"AutoScaling::AutoScalingGroup Worker": {"MaxSize": "4"}},
    },
    "capacity providers start hosts for waiting tasks and drain them": {
        "options": {
            "ECS::CapacityProvider Worker": {
                "AutoScalingGroupProvider.ManagedScaling": {
                    "InstanceWarmupPeriod": 300,
                    "MaximumScalingStepSize": 4,
                    "MinimumScalingStepSize": 1,
                    "Status": "ENABLED",
                    "TargetCapacity": 100,
                }
            },
            "ECS::CapacityProvider": {"AutoScalingGroupProvider.ManagedDraining": "ENABLED"},
            "ECS::ClusterCapacityProviderAssociations": {
                "CapacityProviders": [
                    "<ClusterHeadCapacityA4653531>",
                    "<ClusterWorkerCapacity28C7B737>",
                ],
                "DefaultCapacityProviderStrategy": [],
            },
        }
    },
    "hosts that start slowly are given the time": {  # bare metal: a quarter of an hour
        "metal": {
            "AutoScaling::AutoScalingGroup Worker": {"DefaultInstanceWarmup": 900},
            "AutoScaling::AutoScalingGroup Head": {"DefaultInstanceWarmup": 300},
            "ECS::CapacityProvider Worker": {
                "AutoScalingGroupProvider.ManagedScaling.InstanceWarmupPeriod": 900
            },
        }
    },
    # --- nodes
    "containers are set up for Ray and share the cache of a host": {
        "default": {
            "ECS::TaskDefinition": {
                "@number": 3,  # head, worker and the head of a job
                # A running job keeps its own while the stack is updated.
                "@UpdateReplacePolicy": "Retain",
                "@DeletionPolicy": "Delete",
                "ContainerDefinitions.*.Name": [CONTAINER],
                "ContainerDefinitions.*.LinuxParameters.InitProcessEnabled": [True],  # ECS Exec
                # 120 s is its maximum: that of the host's agent counts.
                "ContainerDefinitions.*.StopTimeout": [None],
                "ContainerDefinitions.*.Ulimits": [
                    [
                        {"Name": "nofile", "SoftLimit": 1_048_576, "HardLimit": 1_048_576},
                        {"Name": "memlock", "SoftLimit": -1, "HardLimit": -1},
                    ]
                ],
                "ContainerDefinitions.*.HealthCheck.Command.0": ["CMD"],
                "ContainerDefinitions.*.LogConfiguration.LogDriver": ["awslogs"],
                "ContainerDefinitions.*.LogConfiguration.Options.mode": ["non-blocking"],
                "Volumes": [{"Name": "cache", "Host": {"SourcePath": CACHE_DIR}}],
                "ContainerDefinitions.*.MountPoints": [
                    [{"SourceVolume": "cache", "ContainerPath": CACHE_DIR, "ReadOnly": False}]
                ],
                # The image's: who the host's folder belongs to.
                "ContainerDefinitions.*.User": [None],
            },
            "ECS::TaskDefinition Head": {"ContainerDefinitions.*.Command": [["head"]]},
            "ECS::TaskDefinition Worker": {"ContainerDefinitions.*.Command": [["worker"]]},
        }
    },
    "containers give up what training does not need": {
        "default": {
            "ECS::TaskDefinition": {
                "ContainerDefinitions.*.Privileged": [None],
                # DAC_OVERRIDE stays: a shell by ECS Exec is root's, and must read what user 1000
                # has written.
                "ContainerDefinitions.*.LinuxParameters.Capabilities": [
                    {
                        "Drop": [
                            "AUDIT_WRITE",
                            "MKNOD",
                            "NET_BIND_SERVICE",
                            "NET_RAW",
                            "SETFCAP",
                            "SETPCAP",
                            "SYS_CHROOT",
                        ]
                    }
                ],
            }
        }
    },
    "Ray's token comes from Secrets Manager": {
        "default": {
            "SecretsManager::Secret": {
                "GenerateSecretString": {"ExcludePunctuation": True, "PasswordLength": 64}
            },
            "ECS::TaskDefinition": {
                "ContainerDefinitions.*.Secrets": [
                    [{"Name": "RAY_AUTH_TOKEN", "ValueFrom": TOKEN}]
                ],
                "ContainerDefinitions.*.Environment.0": [
                    {"Name": "RAY_AUTH_MODE", "Value": "token"}
                ],
            },
        }
    },
    "a deploy waits for no task": {  # A5: one that cannot start holds a stack for three hours
        "ddp fsdp cpu": {"ECS::Service": {"DesiredCount": 0, "@number": 2}}
    },
    "services replace tasks without a spare GPU, on hosts of their kind": {
        "default": {
            "ECS::Service": {
                "DeploymentConfiguration.MinimumHealthyPercent": 0,  # A9
                "DeploymentConfiguration.MaximumPercent": 100,
                "EnableExecuteCommand": True,
                "LaunchType": None,
                "NetworkConfiguration.AwsvpcConfiguration": {
                    "AssignPublicIp": "DISABLED",
                    "SecurityGroups": [NODES],
                    "Subnets": [TRAINING_SUBNET],
                },
            },
            "ECS::Service Head": {
                "CapacityProviderStrategy.*.CapacityProvider": ["<ClusterHeadCapacityA4653531>"]
            },
            "ECS::Service Worker": {
                "CapacityProviderStrategy.*.CapacityProvider": ["<ClusterWorkerCapacity28C7B737>"]
            },
        }
    },
    "only the head has a name, which is soon forgotten": {
        "default": {
            "ServiceDiscovery::Service": {
                "Name": "head",
                "DnsConfig.DnsRecords": [{"Type": "A", "TTL": 10}],  # A16
            },
            "ECS::Service Head": {"ServiceRegistries.*.RegistryArn": ["<NodesName5962D1BD.Arn>"]},
            "ECS::Service Worker": {"ServiceRegistries": None},
        }
    },
    # --- alarms
    "alarms are sent where an address is given": {
        "default": {"SNS::Topic Alarms": {"@number": 0}, "SNS::Subscription": {"@number": 0}},
        "options": {
            "SNS::Subscription": {"Endpoint": "ops@example.org"},
            "CloudWatch::Alarm": {"AlarmActions": ["<DashboardAlarms63C76E69>"], "@number": 5},
        },
    },
    "alarms report failed jobs, and a clean-up that fails or is missing": {
        "default": {
            "CloudWatch::Alarm JobFailed": {
                "MetricName": "ExecutionsFailed",
                "Dimensions": [{"Name": "StateMachineArn", "Value": "<JobsStateMachineBAE459C1>"}],
            },
            "CloudWatch::Alarm KeeperFailed": {
                "MetricName": "Errors",
                "Dimensions": [{"Name": "FunctionName", "Value": "<JobsKeeperC52FC4E4>"}],
                "Namespace": "AWS/Lambda",
                "Statistic": "Sum",
                "DatapointsToAlarm": 2,
                "EvaluationPeriods": 3,
            },
            # Jobs that end call the function too: only the rule shows if it is the sweep.
            "CloudWatch::Alarm SweepMissing": {
                "MetricName": "Invocations",
                "Dimensions": [{"Name": "RuleName", "Value": "<JobsSweepEE978C83>"}],
                "Namespace": "AWS/Events",
                "Statistic": "Sum",
                "ComparisonOperator": "LessThanThreshold",
                "Threshold": 1,
                "TreatMissingData": "breaching",  # what is not called reports nothing
            },
        }
    },
    "ECS's own metrics, which are billed, are a choice": {
        "default": {
            "ECS::Cluster": {"ClusterSettings": [{"Name": "containerInsights", "Value": "enabled"}]}
        },
        "others": {
            "ECS::Cluster": {
                "ClusterSettings": [{"Name": "containerInsights", "Value": "disabled"}]
            }
        },
    },
    # "true" would refuse sessions: their group of logs has no key of the account's.
    "shells are logged without a key": {
        "default": {
            "ECS::Cluster": {
                "Configuration.ExecuteCommandConfiguration.Logging": "OVERRIDE",
                "Configuration.ExecuteCommandConfiguration.LogConfiguration."
                "CloudWatchEncryptionEnabled": None,
            }
        }
    },
    "a deployment's dashboard has its name, as an account has one of a name in all regions": {
        "fsdp": {"CloudWatch::Dashboard": {"DashboardName": "training-fsdp-<AWS::Region>"}}
    },
    # --- network
    "the training subnet reaches the outside through the NAT gateway, and S3 without it": {
        "default": {
            "EC2::Route Training": {
                "RouteTableId": TRAINING_ROUTES,
                "DestinationCidrBlock": "0.0.0.0/0",
                "NatGatewayId": "<VpcNatSubnet1NATGateway07AFA328>",
            },
            "EC2::SubnetRouteTableAssociation Training": {"RouteTableId": TRAINING_ROUTES},
            "EC2::VPCEndpoint": {
                "ServiceName": "com.amazonaws.<AWS::Region>.s3",
                "VpcEndpointType": "Gateway",
                "RouteTableIds.0": TRAINING_ROUTES,
                # With keys of their own, users may read layers of images and packages elsewhere.
                "PolicyDocument.Statement.*.Effect": ["Allow", "Allow"],
                "PolicyDocument.Statement.0.Action": ["s3:Get*", "s3:List*"],
                "PolicyDocument.Statement.1.Resource": ["<Bucket.Arn>", "<Bucket.Arn>/*"],
            },
        }
    },
    "a zone has a subnet for the NAT gateway and one for training": {
        "default": {
            "EC2::VPC": {"CidrBlock": "10.0.0.0/16"},
            "EC2::Subnet Nat": {"CidrBlock": "10.0.0.0/28"},
            "EC2::Subnet Training": {"CidrBlock": "10.0.128.0/17"},
            "EC2::Subnet": {
                "@number": 2,
                "AvailabilityZone": '{"Fn::Select": [0, {"Fn::GetAZs": ""}]}',
            },
        },
        "options": {
            "EC2::VPC": {"CidrBlock": "10.7.0.0/16"},
            "EC2::Subnet Nat": {"CidrBlock": "10.7.0.0/28"},
            "EC2::Subnet Training": {"CidrBlock": "10.7.128.0/17"},
            "EC2::Subnet": {"AvailabilityZone": "us-west-2b"},
        },
    },
    "nothing has a public address but the NAT gateway": {
        "ddp fsdp cpu options": {
            "EC2::Subnet": {"MapPublicIpOnLaunch": False},
            "EC2::EIP": {"@number": 1},
            "EC2::NatGateway": {"AllocationId": "<VpcNatSubnet1EIPE871D937.AllocationId>"},
            "EC2::LaunchTemplate": {"LaunchTemplateData.NetworkInterfaces": None},
            "ECS::Service": {"NetworkConfiguration.AwsvpcConfiguration.AssignPublicIp": "DISABLED"},
        }
    },
    "only the nodes reach the nodes": {
        "ddp fsdp cpu options": {
            "EC2::SecurityGroup": {"@number": 1},
            "EC2::SecurityGroup Cluster": {"SecurityGroupIngress": None},
            "EC2::SecurityGroupIngress": {
                "@number": 1,
                "GroupId": NODES,
                "SourceSecurityGroupId": NODES,
                "IpProtocol": "-1",
            },
        },
    },
    "the default security group is emptied": {
        "default": {
            "Custom::VpcRestrictDefaultSG": {"DefaultSecurityGroupId": "<Vpc.DefaultSecurityGroup>"}
        }
    },
    "everything carries the project's tag": {
        "default": {
            "ECS::Cluster": {"Tags": TAGS},
            "S3::Bucket": {"Tags": TAGS},
            "EC2::NatGateway": {"Tags.1": TAGS[0]},
            "EC2::LaunchTemplate": {
                "LaunchTemplateData.TagSpecifications.*.Tags.1": [TAGS[0], TAGS[0]]
            },
        }
    },
    "the nodes reach themselves and HTTPS": {
        "default": {
            "EC2::SecurityGroup": {
                "SecurityGroupEgress.*.CidrIp": ["0.0.0.0/0"],
                "SecurityGroupEgress.*.ToPort": [443],
            },
            # A19: EFA wants the rule to itself; CDK drops it beside a rule to everywhere.
            "EC2::SecurityGroupEgress": {
                "GroupId": NODES,
                "DestinationSecurityGroupId": NODES,
                "IpProtocol": "-1",
            },
        }
    },
    # --- bucket and repositories
    "the bucket has one owner and no versions": {  # ``test_rules``: it is private and encrypted
        "default": {
            "S3::Bucket": {
                "OwnershipControls.Rules": [{"ObjectOwnership": "BucketOwnerEnforced"}],
                "VersioningConfiguration": None,
            }
        }
    },
    "the bucket is kept unless asked otherwise and then emptied": {
        "default": {
            "S3::Bucket": {"@DeletionPolicy": "Retain", "@UpdateReplacePolicy": "Retain"},
            "Custom::S3AutoDeleteObjects": {"@number": 0},
        },
        "options": {
            "S3::Bucket": {"@DeletionPolicy": "Delete"},
            "Custom::S3AutoDeleteObjects": {"BucketName": "<Bucket>"},
        },
    },
    "old checkpoints get cheaper and are only deleted if asked": {
        "default options others": {
            "S3::Bucket": {
                "LifecycleConfiguration.Rules.0.AbortIncompleteMultipartUpload": {
                    "DaysAfterInitiation": 1
                },
                "LifecycleConfiguration.Rules.*.Id": [
                    "stale-uploads",
                    "old-checkpoints",
                    "old-boots",
                ],
                "LifecycleConfiguration.Rules.*.ExpirationInDays": [None, None, 90],
            }
        },
        "default options": {
            "S3::Bucket": {
                "LifecycleConfiguration.Rules.1.Prefix": "runs/",
                # Records stay as they are.
                "LifecycleConfiguration.Rules.1.ObjectSizeGreaterThan": "1048576",
                "LifecycleConfiguration.Rules.1.Transitions": [
                    {"StorageClass": "GLACIER_IR", "TransitionInDays": 30}
                ],
            }
        },
    },
    "repositories are immutable, scanned, and go with the stack": {
        "default": {
            "ECR::Repository": {
                "@number": 2,
                "@DeletionPolicy": "Delete",
                "ImageTagMutability": "IMMUTABLE",
                "ImageScanningConfiguration": {"ScanOnPush": True},
                "EmptyOnDelete": True,
                # The image that is deployed may be the oldest one: only untagged layers expire.
                "LifecyclePolicy.LifecyclePolicyText": '{"rules":[{"rulePriority":1,"description":'
                '"Layers of failed pushes","selection":{"tagStatus":"untagged","countType":'
                '"sinceImagePushed","countNumber":7,"countUnit":"days"},"action":{"type":'
                '"expire"}}]}',
            }
        }
    },
    "log groups have a retention and go with their stack": {
        "options": {
            "Logs::LogGroup": {
                "@number": 8,
                "@DeletionPolicy": "Delete",
                "RetentionInDays": 7,
                "LogGroupName": None,
            }
        }
    },
    # --- the shared file system
    "a scratch file system is asked for nothing that it refuses, and an update keeps it": {
        "fsx": {
            "FSx::FileSystem": {
                "FileSystemTypeVersion": "2.15",  # AL2023 cannot mount the default, 2.10
                "StorageCapacity": 1200,
                # No path of a bucket: it is linked by an association only.
                "LustreConfiguration": {
                    "DeploymentType": "SCRATCH_2",
                },
                "SubnetIds": [TRAINING_SUBNET],
                "@UpdateReplacePolicy": "Retain",
                "@DeletionPolicy": "Delete",  # by destroy, once its files are exported
            },
            "FSx::DataRepositoryAssociation": {
                "DataRepositoryPath": "s3://<CoreStack:ExportsOutputRefBucket239F7DF2>/datasets/",
                "FileSystemPath": "/",  # nothing on it is outside of the bucket
                "BatchImportMetaDataOnCreate": True,
                "S3.AutoImportPolicy.Events": ["NEW", "CHANGED", "DELETED"],
                "S3.AutoExportPolicy.Events": ["NEW", "CHANGED"],
            },
            "Custom::TerminateHosts": {"SharedStorage": "fsx"},
        },
        "default": {"Custom::TerminateHosts": {"SharedStorage": "none"}},
    },
    "a persistent file system has its throughput and no backups": {
        "persistent": {
            "FSx::FileSystem": {
                "StorageCapacity": 4800,
                "LustreConfiguration": {
                    "DeploymentType": "PERSISTENT_2",
                    "PerUnitStorageThroughput": 500,
                    # FSx makes none of what is linked with a bucket, and refuses to be asked.
                    "AutomaticBackupRetentionDays": 0,
                },
            }
        }
    },
    # --- who pushes images
    "images are pushed only from a named repository, by a provider that outlives the stack": {
        "default others": {"IAM::OIDCProvider": {"@number": 0}},  # others: the account's own
        "options": {
            "IAM::OIDCProvider": {
                "@DeletionPolicy": "Retain",  # an account has one, and others may use it
                "Url": "https://token.actions.githubusercontent.com",
                "ClientIdList": ["sts.amazonaws.com"],
            },
            "IAM::Role ImagePush": {
                "AssumeRolePolicyDocument.Statement.*.Action": ["sts:AssumeRoleWithWebIdentity"],
                "AssumeRolePolicyDocument.Statement.*.Condition": [
                    {
                        "StringEquals": {
                            "token.actions.githubusercontent.com:aud": "sts.amazonaws.com"
                        },
                        "StringLike": {
                            "token.actions.githubusercontent.com:sub": [
                                "repo:acme/train:ref:refs/heads/release",
                                "repo:acme@*/train@*:ref:refs/heads/release",
                            ]
                        },
                    }
                ],
            },
        },
        "others": {
            "IAM::Role ImagePush": {
                "AssumeRolePolicyDocument.Statement.0.Principal.Federated": OTHERS[
                    "github_oidc_provider_arn"
                ],
                # With its ids a repository is trusted, and no other of its name.
                "AssumeRolePolicyDocument.Statement.0.Condition.StringLike": {
                    "token.actions.githubusercontent.com:sub": [
                        "repo:acme@12/train@345:ref:refs/heads/main"
                    ]
                },
            }
        },
    },
}


def plain(value: Any) -> Any:
    """A template's value with its references as text."""
    if isinstance(value, list):
        return [plain(each) for each in value]
    if not isinstance(value, dict):
        return value
    if [*value] == ["Ref"] or any(name.startswith("Fn::") for name in value):
        return text(value)
    return {name: plain(each) for name, each in value.items()}


def at(value: Any, path: list[str]) -> Any:
    """The value under a path; None where there is none."""
    if not path or value is None:
        return value
    name, *rest = path
    if isinstance(value, list):
        if name == "*":
            return [at(each, rest) for each in value]
        return at(value[int(name)], rest) if int(name) < len(value) else None
    return at(value.get(name), rest)


def found(templates: Templates, which: str) -> list[Any]:
    """Resources of a type, and with a part in their names."""
    kind, _, part = which.partition(" ")
    kind = kind if kind.startswith("Custom") else f"AWS::{kind}"
    resources = templates.resources.items()
    return [plain(each) for name, each in resources if each["Type"] == kind and part in name]


@pytest.mark.parametrize("sentence", FACTS)
def test_the_templates_say_that(sentence: str, synth: Synth) -> None:
    for settings, of_resources in FACTS[sentence].items():
        for name in settings.split():
            templates = synth(**SETTINGS[name])
            for which, expected in of_resources.items():
                there, wanted = found(templates, which), dict(expected)
                number = wanted.pop("@number", len(there) or "some")
                assert len(there) == number, f"{name}: {which}"
                for path, value in wanted.items():
                    for each in there:
                        own, place = each.get("Properties"), path
                        if path.startswith("@"):
                            own, place = each, path[1:]
                        assert at(own, place.split(".")) == value, f"{name}: {which}: {path}"
