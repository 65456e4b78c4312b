//! Options in the form of `mount -o`.
//!
//! | options | what happens to them |
//! |---|---|
//! | what the engine or the kernel does | they are followed |
//! | of mount alone (`noauto`, `_netdev`, `x-...`), or true in any case (`noatime`, `default_permissions`) | they are ignored ([`words::LET_BE`]) |
//! | wishes: without them the result is as correct, and at most slower or larger | they are accepted, with one warning ([`words::WISHES`]) |
//! | promises that this program does not keep: when data is stored, what a damaged volume shows, what each user may do | they are refused by name, as not supported ([`words::REFUSED`]) |
//! | all others | wrong usage; ignored if mount asks for that |
//!
//! An option that only one format has is refused by name on a volume of the other one.

mod words;

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use nix::unistd::{Group, User};
use offshoot_fuse::{ShownOwner, Transport};
use offshoot_vfs::{Code, Error};

use crate::exit::{Result, VerbFailure};
use crate::verbs::btrfs::rescuing::{RescueArguments, RescueWay};
use crate::verbs::btrfs::storing::Storing;
use words::{LET_BE, ONLY_BTRFS, REFUSED, REPEATED, WISHES, XFS_LET_BE, XFS_REFUSED, XFS_WISHES};

/// The options of a mount.
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(clippy::struct_excessive_bools, reason = "each is an option of its own")]
pub(crate) struct MountCommandOptions {
    pub(crate) is_read_only: bool,
    pub(crate) allows_suid: bool,
    pub(crate) allows_devices: bool,
    pub(crate) allows_exec: bool,
    pub(crate) allows_others: bool,
    /// The mount can be shown elsewhere with mapped ids.
    pub(crate) allows_idmap: bool,
    /// The mount is one of a block device.
    pub(crate) is_fuseblk: bool,
    pub(crate) is_degraded: bool,
    /// Read the volume as the last commit left it.
    pub(crate) ignores_log: bool,
    /// The ways to read a damaged volume.
    pub(crate) rescue: Vec<RescueWay>,
    pub(crate) is_remount: bool,
    /// A missing volume is not an error: it is just not mounted.
    pub(crate) may_be_missing: bool,
    /// Give up all rights that the process does not need while it serves.
    pub(crate) has_sandbox: bool,
    pub(crate) owner: ShownOwner,
    pub(crate) transport: Transport,
    pub(crate) subvolume: Option<OsString>,
    /// The id of the subvolume. If a path is given too, both must name the same subvolume.
    pub(crate) subvolume_id: Option<u64>,
    pub(crate) storing: Storing,
    pub(crate) commit: Option<Duration>,
    /// Whether fsync writes the tree log instead of committing.
    pub(crate) has_tree_log: bool,
    pub(crate) is_discarding: bool,
    pub(crate) flushes_on_commit: bool,
    pub(crate) devices: Vec<PathBuf>,
    /// Options that are accepted and not followed.
    pub(crate) wishes: Vec<String>,
    /// The first option that only a volume of btrfs takes.
    pub(crate) only_btrfs: Option<String>,
    /// The first option that only a volume of XFS takes.
    pub(crate) only_xfs: Option<String>,
}

impl Default for MountCommandOptions {
    fn default() -> Self {
        Self {
            is_read_only: false,
            allows_suid: false,
            allows_devices: false,
            allows_exec: true,
            allows_others: false,
            allows_idmap: false,
            is_fuseblk: false,
            is_degraded: false,
            ignores_log: false,
            rescue: Vec::new(),
            is_remount: false,
            may_be_missing: false,
            has_sandbox: true,
            owner: ShownOwner::default(),
            transport: Transport::default(),
            subvolume: None,
            subvolume_id: None,
            storing: Storing::default(),
            commit: None,
            has_tree_log: true,
            is_discarding: false,
            flushes_on_commit: false,
            devices: Vec::new(),
            wishes: Vec::new(),
            only_btrfs: None,
            only_xfs: None,
        }
    }
}

impl MountCommandOptions {
    /// Parses `options`, one option in each. With `is_sloppy`, unknown options are ignored.
    pub(crate) fn parse(options: &[String], is_sloppy: bool) -> Result<Self> {
        let mut wanted = Self::default();
        for option in options.iter().filter(|option| !option.is_empty()) {
            wanted.add(option, is_sloppy)?;
        }
        Ok(wanted)
    }

    /// The options in `options` that contradict these. `ro`, `suid`, `dev` and `exec` do not count,
    /// because a remount can change them.
    pub(crate) fn others(mut self, options: &[String], is_sloppy: bool) -> Result<Vec<&str>> {
        let mut others = Vec::new();
        for option in options.iter().filter(|option| !option.is_empty()) {
            let before = self.fixed();
            self.add(option, is_sloppy)?;
            if self.fixed() != before {
                others.push(option.as_str());
            }
        }
        Ok(others)
    }

    /// The error if `subvol=` names the subvolume `found`, but `subvolid=` names another one.
    pub(crate) fn other_subvolume(&self, found: u64) -> VerbFailure {
        let path =
            self.subvolume.as_ref().map_or_else(String::new, |path| path.display().to_string());
        let id = self.subvolume_id.unwrap_or_default();
        VerbFailure::Usage(format!(
            "subvol={path} has the number {found}, and subvolid={id} another"
        ))
    }

    /// These options without those that a remount can change.
    fn fixed(&self) -> Self {
        let free = Self::default();
        Self {
            is_read_only: free.is_read_only,
            allows_suid: free.allows_suid,
            allows_devices: free.allows_devices,
            allows_exec: free.allows_exec,
            is_remount: free.is_remount,
            may_be_missing: free.may_be_missing,
            wishes: free.wishes,
            only_btrfs: free.only_btrfs,
            only_xfs: free.only_xfs,
            ..self.clone()
        }
    }

    fn add(&mut self, option: &str, is_sloppy: bool) -> Result {
        let (name, value) = name_and_value(option);
        let words = || format!("the mount option {option}");
        if [XFS_LET_BE, XFS_WISHES].iter().any(|list| list.contains(&name)) {
            self.only_xfs.get_or_insert_with(words);
        } else if ONLY_BTRFS.contains(&name) || Storing::default().add(option)? {
            self.only_btrfs.get_or_insert_with(words);
        }
        match (name, value) {
            ("ro", None) => self.is_read_only = true,
            ("rw", None) => self.is_read_only = false,
            ("suid", None) => self.allows_suid = true,
            ("nosuid", None) => self.allows_suid = false,
            ("dev", None) => self.allows_devices = true,
            ("nodev", None) => self.allows_devices = false,
            ("exec", None) => self.allows_exec = true,
            ("noexec", None) => self.allows_exec = false,
            ("allow_other", None) => self.allows_others = true,
            ("idmap", None) => self.allows_idmap = true,
            ("noidmap", None) => self.allows_idmap = false,
            ("io_uring", None) => self.transport = Transport::IoUring,
            ("noio_uring", None) => self.transport = Transport::Device,
            ("fuseblk", None) => self.is_fuseblk = true,
            ("nofuseblk", None) => self.is_fuseblk = false,
            ("degraded", None) => self.is_degraded = true,
            ("nosandbox", None) => self.has_sandbox = false,
            ("remount", None) => self.is_remount = true,
            ("uid", Some(value)) => self.owner.uid = Some(user(option, value)?),
            ("gid", Some(value)) => self.owner.gid = Some(group(option, value)?),
            ("nofail", None) => self.may_be_missing = true,
            ("fail", None) => self.may_be_missing = false,
            // Without the log replay the volume is not written either, as for the kernel.
            ("norecovery" | "nologreplay", None) => self.ignores_log = true,
            ("usebackuproot" | "recovery", None) => self.rescue.push(RescueWay::UseBackupRoot),
            ("rescue", Some(value)) => {
                let ways = RescueArguments::of_mount_option(value).ok_or_else(|| {
                    Error::unsupported(Code::Unsupported, format!("the mount option {option}"))
                })?;
                let is_of_log = |way| matches!(way, RescueWay::NoLogReplay | RescueWay::All);
                self.ignores_log |= ways.iter().copied().any(is_of_log);
                self.rescue.extend(ways.into_iter().filter(|&way| way != RescueWay::NoLogReplay));
            }
            ("treelog", None) => self.has_tree_log = true,
            ("notreelog", None) => self.has_tree_log = false,
            // Both modes are the same here: freed space may be reused before it is discarded.
            ("discard", None | Some("sync" | "async")) => self.is_discarding = true,
            ("nodiscard", None) => self.is_discarding = false,
            ("flushoncommit", None) => self.flushes_on_commit = true,
            ("noflushoncommit", None) => self.flushes_on_commit = false,
            ("subvolid", Some(value)) => {
                // The top level has two ids, 0 and 5.
                let id = match number::<u64>(option, value)? {
                    0 => 5,
                    id => id,
                };
                self.subvolume_id = Some(id);
            }
            // Without the slash, a path that is a number would be taken for an id.
            ("subvol", Some(value)) => {
                self.subvolume = Some(format!("/{}", value.trim_start_matches('/')).into());
            }
            ("device", Some(value)) => {
                let device = PathBuf::from(value);
                if !self.devices.contains(&device) {
                    self.devices.push(device);
                }
            }
            ("commit", Some(value)) => {
                let secs = number(option, value)?;
                self.commit = (secs > 0).then(|| Duration::from_secs(secs));
            }
            _ if self.storing.add(option)? => {}
            _ if name.starts_with("x-") || name.starts_with("X-") || name == "comment" => {}
            // The kernel handles security labels, and adds this option to the table of mounts.
            ("seclabel", None) => {}
            _ if LET_BE.contains(&option) || XFS_LET_BE.contains(&name) => {}
            (name, Some(_)) if REPEATED.contains(&name) => {}
            (name, _) if WISHES.contains(&name) || XFS_WISHES.contains(&name) => {
                self.wishes.push(option.to_owned());
            }
            (name, _) if REFUSED.contains(&name) || XFS_REFUSED.contains(&name) => {
                return Err(Error::unsupported(
                    Code::Unsupported,
                    format!("the mount option {option}"),
                )
                .into());
            }
            _ if is_sloppy => {}
            _ => return Err(VerbFailure::Usage(format!("the mount option {option} is not known"))),
        }
        Ok(())
    }
}

/// Parses a user, given by number or name.
fn user(option: &str, value: &str) -> Result<u32> {
    if let Ok(uid) = value.parse() {
        return Ok(uid);
    }
    match User::from_name(value) {
        Ok(Some(user)) => Ok(user.uid.as_raw()),
        Ok(None) => Err(VerbFailure::Usage(format!("{option}: there is no such user"))),
        Err(errno) => Err(VerbFailure::Host(option.to_owned(), errno.into())),
    }
}

/// Parses a group, given by number or name.
fn group(option: &str, value: &str) -> Result<u32> {
    if let Ok(gid) = value.parse() {
        return Ok(gid);
    }
    match Group::from_name(value) {
        Ok(Some(group)) => Ok(group.gid.as_raw()),
        Ok(None) => Err(VerbFailure::Usage(format!("{option}: there is no such group"))),
        Err(errno) => Err(VerbFailure::Host(option.to_owned(), errno.into())),
    }
}

/// The name of an option, and its value if it has one.
pub(crate) fn name_and_value(option: &str) -> (&str, Option<&str>) {
    option.split_once('=').map_or((option, None), |(name, value)| (name, Some(value)))
}

/// The value of an option that says a number.
pub(crate) fn number<T: std::str::FromStr>(option: &str, value: &str) -> Result<T> {
    value.parse().map_err(|_| VerbFailure::Usage(format!("{option} does not say a number")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(options: &str) -> Result<MountCommandOptions> {
        let options: Vec<_> = options.split(',').map(str::to_owned).collect();
        MountCommandOptions::parse(&options, false)
    }

    /// Whether these options leave all as it is without them, but for the format that they are for.
    fn changes_nothing(options: &str) -> bool {
        let wanted = parse(options).expect("all of them are known");
        let (only_btrfs, only_xfs) = (None, None);
        MountCommandOptions { only_btrfs, only_xfs, ..wanted } == MountCommandOptions::default()
    }

    #[test]
    fn options_of_one_format_are_known_for_that() {
        let only = |options: &str| {
            let wanted = parse(options).expect("all of them are known");
            (wanted.only_btrfs, wanted.only_xfs)
        };
        let named = |option: &str| Some(format!("the mount option {option}"));
        assert_eq!(only("rw,noatime,x-initrd.mount,norecovery,uid=7"), (None, None));
        for option in ["compress=zstd", "nodatacow", "subvol=/@", "commit=5", "ssd", "discard"] {
            assert_eq!(only(&format!("rw,{option},degraded")), (named(option), None));
        }
        for option in ["inode64", "noquota", "logbufs=8", "logbsize=32k", "swalloc", "sunit=8"] {
            assert_eq!(only(&format!("rw,{option},attr2")), (None, named(option)));
        }
        assert_eq!(
            parse("allocsize=64m,inode64").map(|it| it.wishes).ok(),
            Some(vec!["allocsize=64m".to_owned()])
        );
        for option in ["inode32", "wsync", "uquota", "prjquota", "rtdev=/dev/x", "dax=always"] {
            let refused = parse(option).map_err(|failure| failure.to_string());
            assert_eq!(refused, Err(format!("not supported: the mount option {option}")));
        }
    }

    #[test]
    fn what_is_asked_for_is_wanted() {
        assert_eq!(parse("").ok(), Some(MountCommandOptions::default()));
        let wanted = parse(
            "ro,rw,noatime,x-systemd.automount,subvol=2024,uid=7,commit=5,compress-force=zstd:3,noexec,dev",
        );
        let wanted = wanted.expect("all of them are known");
        assert_eq!(wanted.subvolume, Some("/2024".into()));
        assert_eq!(wanted.owner, ShownOwner { uid: Some(7), gid: None });
        assert_eq!(wanted.commit, Some(Duration::from_secs(5)));
        assert!(wanted.storing.compress.is_some_and(|compress| compress.is_forced));
        assert!(
            !wanted.is_read_only
                && !wanted.allows_exec
                && wanted.allows_devices
                && !wanted.allows_suid
        );
        assert_eq!(parse("subvolid=0").ok().and_then(|w| w.subvolume_id), Some(5));
        let root = ShownOwner { uid: Some(0), gid: Some(0) };
        assert_eq!(parse("uid=root,gid=root").map(|wanted| wanted.owner).ok(), Some(root));
        for option in ["norecovery", "nologreplay", "rescue=nologreplay", "rescue=all"] {
            assert_eq!(parse(option).map(|wanted| wanted.ignores_log).ok(), Some(true), "{option}");
        }
        for (option, ways) in [
            ("usebackuproot", vec![RescueWay::UseBackupRoot]),
            ("rescue=all", vec![RescueWay::All]),
            ("rescue=nologreplay", vec![]),
            (
                "rescue=ibadroots:usebackuproot",
                vec![RescueWay::IgnoreBadRoots, RescueWay::UseBackupRoot],
            ),
        ] {
            assert_eq!(parse(option).map(|wanted| wanted.rescue).ok(), Some(ways), "{option}");
        }
        assert!(changes_nothing("compress=zlib,compress=none"));
        assert_eq!(parse("notreelog").map(|wanted| wanted.has_tree_log).ok(), Some(false));
        assert!(changes_nothing("notreelog,treelog"));
        assert_eq!(parse("user_id=0,group_id=0").ok(), Some(MountCommandOptions::default()));
        assert!(changes_nothing("commit=0"));
        for option in ["discard", "discard=sync", "discard=async"] {
            assert_eq!(
                parse(option).map(|wanted| wanted.is_discarding).ok(),
                Some(true),
                "{option}"
            );
        }
        assert!(changes_nothing("discard,nodiscard"));
        assert_eq!(parse("flushoncommit").map(|wanted| wanted.flushes_on_commit).ok(), Some(true));
        assert!(changes_nothing("flushoncommit,noflushoncommit"));
    }

    #[test]
    fn what_is_not_done_is_refused_by_name() {
        for option in ["sync", "noacl", "writeback", "rescue=ignoremetacsums", "context=x"] {
            let refused = parse(option).map_err(|failure| failure.to_string());
            assert_eq!(refused, Err(format!("not supported: the mount option {option}")));
        }
        for option in [
            "bogus",
            "uid=no such user",
            "gid=no such group",
            "subvol",
            "ro=1",
            "compress=gzip",
            "commit=soon",
            "uid",
            "max_inline=4x",
            "discard=later",
        ] {
            let refused = parse(option);
            assert!(matches!(refused, Err(VerbFailure::Usage(_))), "{option}: {refused:?}");
        }
        assert!(MountCommandOptions::parse(&["bogus".to_owned()], true).is_ok());
        assert!(MountCommandOptions::parse(&["sync".to_owned()], true).is_err());
    }

    #[test]
    fn wishes_are_accepted_and_told() {
        let wanted = parse("autodefrag,thread_pool=4,rw,space_cache,space_cache=v2,skip_balance");
        let wishes = wanted.map(|wanted| wanted.wishes).unwrap_or_default();
        assert_eq!(wishes, ["autodefrag", "thread_pool=4", "space_cache", "skip_balance"]);
        let lists =
            [LET_BE, REPEATED, WISHES, REFUSED, XFS_LET_BE, XFS_WISHES, XFS_REFUSED].concat();
        let mut once = lists.clone();
        once.sort_unstable();
        once.dedup();
        // `user` is in two lists: alone, and with a value.
        assert_eq!(once.len() + 1, lists.len(), "an option is in two lists");
    }

    #[test]
    fn what_is_in_force_can_be_repeated() {
        let list = |options: &str| options.split(',').map(str::to_owned).collect::<Vec<_>>();
        let others = |in_force: &str, options: &str| {
            let options = list(options);
            let in_force =
                MountCommandOptions::parse(&list(in_force), false).expect("they are known");
            let others = in_force.others(&options, false).expect("they are known");
            others.into_iter().map(str::to_owned).collect::<Vec<_>>()
        };
        let in_force = "subvol=/@,compress=zstd:1,uid=7,device=/dev/x";
        let repeated = "remount,ro,nodev,subvol=@,compress=zstd:1,device=/dev/x,lazytime";
        assert_eq!(others(in_force, repeated), [""; 0]);
        let changed = "remount,compress=lzo,commit=5,uid=7";
        assert_eq!(others(in_force, changed), ["compress=lzo", "commit=5"]);
    }
}
