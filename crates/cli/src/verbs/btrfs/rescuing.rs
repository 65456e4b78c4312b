//! How a damaged volume is read, as options of verbs and as the mount option `rescue`.

use clap::{Args, ValueEnum};
use offshoot_btrfs::{Rescue, RootChoice};

/// A way to read a damaged volume. The words are those of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum RescueWay {
    /// Through the newest root that can be used: that of the superblock or of a backup in it
    #[value(name = "usebackuproot")]
    UseBackupRoot,
    /// Without trees that reading files does not need, when their roots are bad
    #[value(name = "ignorebadroots", alias = "ibadroots")]
    IgnoreBadRoots,
    /// Without comparing checksums of data
    #[value(name = "ignoredatacsums", alias = "idatacsums")]
    IgnoreDataChecksums,
    /// Without what was fsynced since the last commit
    #[value(name = "nologreplay")]
    NoLogReplay,
    /// All of them
    #[value(name = "all")]
    All,
}

/// How a damaged volume is read.
#[derive(Args, Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct RescueArguments {
    /// Read a damaged volume in these ways, which are those of the mount option of this name
    #[arg(long, value_name = "WAY", value_delimiter = ',')]
    pub(crate) rescue: Vec<RescueWay>,
    /// Take data as it is read, without comparing checksums
    #[arg(long)]
    pub(crate) ignore_checksums: bool,
}

impl RescueArguments {
    /// The ways that the value of the mount option `rescue` names, separated by colons; `None` when
    /// it names an unknown one.
    pub(crate) fn of_mount_option(value: &str) -> Option<Vec<RescueWay>> {
        value.split(':').map(|word| RescueWay::from_str(word, false).ok()).collect()
    }

    fn has(&self, way: RescueWay) -> bool {
        self.rescue.iter().any(|&one| one == way || one == RescueWay::All)
    }

    /// Whether a pending log is ignored.
    pub(crate) fn ignores_log(&self) -> bool {
        self.has(RescueWay::NoLogReplay)
    }

    /// How the engine reads the volume, if the verb itself needs `rescue`.
    pub(crate) fn of_engine(&self, mut rescue: Rescue) -> Rescue {
        if rescue.root == RootChoice::Newest && self.has(RescueWay::UseBackupRoot) {
            rescue.root = RootChoice::Usable;
        }
        rescue.ignores_bad_roots |= self.has(RescueWay::IgnoreBadRoots);
        rescue.ignores_checksums |=
            self.ignore_checksums || self.has(RescueWay::IgnoreDataChecksums);
        rescue
    }

    /// Whether the volume is read in another way than usually.
    pub(crate) fn is_set(&self) -> bool {
        self.of_engine(Rescue::default()).is_set()
    }

    /// The words on a command line that stand for these options.
    pub(crate) fn words(&self) -> Vec<String> {
        let ways = self.rescue.iter().filter_map(ValueEnum::to_possible_value);
        let mut words: Vec<_> = ways.map(|way| format!("--rescue={}", way.get_name())).collect();
        words.extend(self.ignore_checksums.then(|| "--ignore-checksums".to_owned()));
        words
    }
}
