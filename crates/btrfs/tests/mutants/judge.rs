//! Judges volumes in memory: `btrfs check` and the kernel.
//!
//! The images of a volume are in files. Before a judge looks, this writes the differences of the
//! volume to the files, and undoes the differences of the volume before. That is far less than a
//! whole image.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::ffi::OsStr;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Output;
use std::sync::{Arc, mpsc};
use std::time::Duration;

use offshoot_device::{BlockDevice, MemoryDevice};
use offshoot_testkit::btrfs::disks::{AttachedImages, Disks, MountedMembers};
use offshoot_testkit::btrfs::judges;
use offshoot_testkit::host::HostFilesystem;
use offshoot_testkit::run::command;

use crate::image::{Patched, SparseImage};
use crate::patch::SECTOR;
use crate::view::{PathView, view};

/// How long `btrfs check` may take, in seconds. On some volumes it never ends.
const CHECK_SECONDS: &str = "20";

/// The images of a volume in files.
pub(crate) struct CheckJudge {
    disks: Disks,
    files: Vec<File>,
    sound: Vec<Patched>,
    /// Where each file differs from its image: places and lengths.
    touched: Vec<BTreeSet<(u64, usize)>>,
}

/// The complaints of `btrfs check`: their kinds, and the objects of each kind.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct CheckComplaints {
    kinds: BTreeMap<String, BTreeSet<String>>,
    /// Whether it crashed or was stopped.
    pub(crate) is_broken: bool,
}

/// The mode of `btrfs check`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CheckMode {
    /// It keeps a record of each extent and inode.
    Original,
    /// It looks up what belongs to an item when it meets the item.
    Lowmem,
}

impl CheckMode {
    fn name(self) -> &'static str {
        match self {
            Self::Original => "original",
            Self::Lowmem => "lowmem",
        }
    }
}

impl CheckJudge {
    /// A judge of volumes that differ little from the one on `disks`. `images` are its images.
    pub(crate) fn new(disks: Disks, images: &[Arc<SparseImage>]) -> Self {
        let open = |path| File::options().write(true).open(path).expect("an image opens");
        let files: Vec<_> = disks.images().iter().map(open).collect();
        let sound = images.iter().map(Patched::new).collect();
        let touched = files.iter().map(|_| BTreeSet::new()).collect();
        Self { disks, files, sound, touched }
    }

    /// Makes the files hold what the devices hold. The devices lie over the images.
    fn hold(&mut self, devices: &[Arc<MemoryDevice>]) {
        for (member, device) in devices.iter().enumerate() {
            let file = &self.files[member];
            for (at, len) in std::mem::take(&mut self.touched[member]) {
                let mut bytes = vec![0; len];
                self.sound[member].read_at(at, &mut bytes).expect("memory");
                file.write_all_at(&bytes, at).expect("an image is written");
            }
            let touched = &mut self.touched[member];
            device
                .visit_changes(&mut |at, bytes| {
                    touched.insert((at, bytes.len()));
                    file.write_all_at(bytes, at)
                })
                .expect("an image is written");
        }
    }

    /// Writes the images, as they are on the devices, to files in `dir`.
    pub(crate) fn keep(&mut self, devices: &[Arc<MemoryDevice>], dir: &Path) {
        self.hold(devices);
        std::fs::create_dir_all(dir).expect("a directory");
        for image in self.disks.images() {
            let to = dir.join(image.file_name().expect("a name"));
            let args = ["--sparse=always".as_ref(), image.as_os_str(), to.as_os_str()];
            offshoot_testkit::run::run("cp", &args);
        }
    }

    /// Devices over our images that hold what is on `disks`. Those images differ little from ours.
    pub(crate) fn images_over(&self, disks: &Disks) -> Vec<Arc<MemoryDevice>> {
        const PIECE: usize = 16 << 10;
        let member = |(sound, path): (&Patched, &std::path::PathBuf)| {
            let over = MemoryDevice::over(Arc::new(sound.clone()));
            let file = File::open(path).expect("an image opens");
            let (mut old, mut new) = (vec![0; PIECE], vec![0; PIECE]);
            for at in (0..sound.size_bytes()).step_by(PIECE) {
                let len = PIECE.min(usize::try_from(sound.size_bytes() - at).expect("small"));
                sound.read_at(at, &mut old[..len]).expect("memory");
                file.read_exact_at(&mut new[..len], at).expect("an image reads");
                if old[..len] != new[..len] {
                    over.write_at(at, &new[..len]).expect("memory");
                }
            }
            Arc::new(over)
        };
        self.sound.iter().zip(disks.images()).map(member).collect()
    }

    /// What `btrfs check` finds in one of its modes.
    pub(crate) fn check(
        &mut self,
        devices: &[Arc<MemoryDevice>],
        mode: CheckMode,
    ) -> CheckComplaints {
        self.hold(devices);
        // `btrfs check` finds several members only if they are block devices.
        let attached = (self.files.len() > 1).then(|| AttachedImages::new(self.disks.images()));
        let check = |place: &OsStr| -> Output {
            let mut check = command("timeout");
            check.args([CHECK_SECONDS, "btrfs", "check", "--readonly"]);
            check.args(["--mode", mode.name()]).arg(place);
            check.output().expect("btrfs check runs")
        };
        let output = match &attached {
            Some(attached) => attached.checked(|device| check(device.as_ref())),
            None => check(self.disks.images()[0].as_ref()),
        };
        let text = [output.stdout, output.stderr].concat();
        let mut complaints = CheckComplaints::parse(&String::from_utf8_lossy(&text));
        complaints.is_broken = !matches!(output.status.code(), Some(0 | 1));
        complaints
    }

    /// What the kernel shows.
    ///
    /// # Errors
    /// The error of the mount, when the kernel refuses it.
    pub(crate) fn kernel(&mut self, devices: &[Arc<MemoryDevice>]) -> Result<PathView, String> {
        let seen = |mount: &Path| HostFilesystem::new(mount).map(|host| view(&host));
        self.look_at_kernels(devices, seen)?.map_err(|error| error.to_string())
    }

    /// What `look` finds on the kernel's mount of the volume.
    ///
    /// # Errors
    /// What the kernel said when it refused to mount it.
    pub(crate) fn look_at_kernels<T>(
        &mut self,
        devices: &[Arc<MemoryDevice>],
        look: impl FnOnce(&Path) -> T,
    ) -> Result<T, String> {
        self.hold(devices);
        let Some(judges) = judges::require() else { return Err("there is no kernel".to_owned()) };
        // Even a read-only mount replays a log, and that must not stay in the files.
        let copy = self.disks.copy(&judges);
        let options = "ro,noatime,subvolid=5";
        let mount = |options: &str| MountedMembers::try_new(copy.images(), options);
        let mount = mount(options).or_else(|error| {
            // The devices may still have been busy with the mount before. When we stopped to write
            // a damaged volume, we may have left a log that the kernel cannot replay, because the
            // replay meets the damage.
            std::thread::sleep(Duration::from_millis(200));
            mount(&format!("{options},rescue=nologreplay")).map_err(|_| error)
        })?;
        Ok(look(mount.path()))
    }
}

impl CheckJudge {
    /// Has the kernel mount the volume for writing, and runs `work` on it. Returns the images after
    /// that.
    ///
    /// # Errors
    /// The error of the mount, when the kernel refuses it, or that the kernel does not return.
    pub(crate) fn kernel_changes(
        &mut self,
        devices: &[Arc<MemoryDevice>],
        work: impl FnOnce(&Path) + Send + 'static,
    ) -> Result<Disks, String> {
        const LIMIT: Duration = Duration::from_secs(60);
        self.hold(devices);
        let Some(judges) = judges::require() else { return Err("there is no kernel".to_owned()) };
        let copy = self.disks.copy(&judges);
        let (done, result) = mpsc::channel();
        std::thread::spawn(move || {
            let mount = MountedMembers::try_new(copy.images(), "rw,noatime,subvolid=5");
            let changed = mount.map(|mount| {
                work(mount.path());
                if let Ok(root) = File::open(mount.path()) {
                    // The kernel may have stopped writing, which is a valid result.
                    let _ = rustix::fs::syncfs(root);
                }
                drop(mount);
                copy
            });
            let _ = done.send(changed);
        });
        result.recv_timeout(LIMIT).unwrap_or_else(|_| Err(format!("not done after {LIMIT:?}")))
    }
}

impl CheckComplaints {
    /// The kinds of complaints.
    pub(crate) fn kinds(&self) -> Vec<&str> {
        self.kinds.keys().map(String::as_str).collect()
    }

    fn parse(output: &str) -> Self {
        // The free range that a group counts changes with every write. Another line of the same
        // complaint names the group, and that stays.
        // A chunk whose length is no multiple of 64 KiB is no error to `btrfs check`, which ends as
        // on a sound volume: converted volumes have such chunks, and the kernel reads and writes
        // them. A repair believes the chunk, and leaves its length.
        // The search for members meets damaged volumes of other tests. If the superblock of this
        // one were wrong, it would not be opened.
        const HARMLESS: [&str; 29] = [
            "warning line #",
            "WARNING: chunk[# #) is not fully aligned to BTRFS_STRIPE_LEN",
            "wanted bytes #, found #",
            "wanted offset #, found #",
            "there is no free space entry for",
            "free space info recorded",
            "Opening filesystem to check",
            "Checking filesystem on",
            "UUID:",
            "found # bytes used",
            "no error found",
            "error(s) found",
            "total csum bytes:",
            "total tree bytes:",
            "total fs tree bytes:",
            "total extent tree bytes:",
            "btree space waste bytes:",
            "file data blocks allocated:",
            "referenced #",
            "[#/#]",
            "cache and super generation don't match",
            "ERROR: errors found in",
            "WARNING: adding device",
            "ERROR: cannot scan",
            "ERROR: superblock checksum mismatch",
            "Ignoring transid failure",
            "ERROR: failed to repair",
            "ERROR: fsroot",
            "bad block",
        ];
        let mut complaints = Self::default();
        for line in output.lines().map(str::trim).filter(|line| !line.is_empty()) {
            let line = without_names(line);
            let (shape, numbers) = shape(&line);
            if HARMLESS.iter().any(|harmless| shape.starts_with(harmless)) {
                continue;
            }
            if ROOTS.iter().any(|root| shape.contains(root)) {
                complaints.kinds.entry(ROOT_ITEM.to_owned()).or_default().insert(numbers);
                continue;
            }
            if FREE_SPACE.iter().any(|free| shape.contains(free)) {
                complaints.kinds.entry("free space".to_owned()).or_default().insert(numbers);
                continue;
            }
            // `root 5 inode 257 errors 2001, no inode item, link count wrong`
            let (object, kinds) = match shape.split_once(" errors #, ") {
                Some((object, kinds)) => {
                    (object.to_owned(), kinds.split(", ").map(str::to_owned).collect())
                }
                None => (String::new(), vec![shape]),
            };
            for kind in kinds {
                let kind = if object.is_empty() { kind } else { format!("{object}: {kind}") };
                complaints.kinds.entry(kind).or_default().insert(numbers.clone());
            }
        }
        complaints
    }

    /// Whether there are none.
    pub(crate) fn is_empty(&self) -> bool {
        self.kinds.is_empty() && !self.is_broken
    }

    /// Whether the low-memory mode finds more wrong with files than `before`, which is of that mode
    /// too.
    ///
    /// An entry that names the last inode number confuses that mode. It then reports more or fewer
    /// complaints about the same directory, or about the same index in it. Any other new complaint
    /// is worse.
    pub(crate) fn is_worse_for_files_than(&self, before: &Self) -> bool {
        const LAST_INODE: &str = "18446744073709551615";
        // `ERROR: root 5 DIR INDEX[297 14] name`
        let places = |complaints: &Self| -> Vec<[String; 2]> {
            let numbers = complaints.kinds.values().flatten();
            let place = |numbers: &String| {
                let mut numbers = numbers.split(' ').skip(1).map(str::to_owned);
                Some([numbers.next()?, numbers.next().unwrap_or_default()])
            };
            numbers.filter_map(place).collect()
        };
        let known = places(before);
        if known.iter().any(|[inode, _]| inode == LAST_INODE) {
            let is_known = |[inode, index]: &[String; 2]| {
                let is_same = |[other, at]: &[String; 2]| {
                    other == inode || other == LAST_INODE && at == index
                };
                known.iter().any(is_same)
            };
            return !places(self).iter().all(is_known);
        }
        before.is_broken || !self.beyond(before).is_empty()
    }

    /// The complaints that are here and not in `before`: the kind, and an example.
    pub(crate) fn beyond(&self, before: &Self) -> BTreeMap<String, String> {
        let mut new = BTreeMap::new();
        // This complaint names the extent, and then the address that the file has for it.
        let other = before.kinds.get(OTHER_ADDRESS).into_iter().flatten();
        let other: HashSet<_> = other.filter_map(|object| object.split(' ').nth(3)).collect();
        // The complaint about an extent may change its kind when the extent changes once more.
        let addresses = before.kinds.values().flatten().filter_map(|one| address(one));
        let addresses: HashSet<_> = addresses.chain(other.iter().copied()).collect();
        let is_new = |object: &&String| address(object).is_none_or(|at| !addresses.contains(at));
        let inode = |object: &String| -> Vec<String> {
            object.split(' ').take(2).map(str::to_owned).collect()
        };
        let bad = before.kinds.get(BAD_EXTENT).into_iter().flatten();
        let bad: HashSet<_> = bad.map(inode).collect();
        let is_unaligned = |at: &str| at.parse::<u64>().is_ok_and(|at| !at.is_multiple_of(SECTOR));
        let is_one_unaligned = other.iter().any(|at| is_unaligned(at));
        // Some trees are already wrong: structures disagree about their root, or a block that is
        // counted for them is missing. When one of the structures changes, the complaint has
        // another kind.
        let unlike = before.kinds.get(ROOT_ITEM).into_iter().flatten();
        let unlike = unlike.filter_map(|object| object.split(' ').next());
        let without = before.kinds.get(NO_TREE_BLOCK).into_iter().flatten();
        let without = without.filter_map(|object| object.split(' ').nth(2));
        let bad_roots: HashSet<_> = unlike.chain(without).collect();
        for (kind, objects) in &self.kinds {
            // `btrfs check` takes what follows an unaligned extent for a part of it.
            let is_behind_bad = |object: &&String| {
                kind == NO_CSUM && (is_one_unaligned || bad.contains(&inode(object)))
            };
            let is_of_bad_root = |object: &&String| {
                [ROOT_ITEM, NO_ROOT_DIR].contains(&kind.as_str())
                    && object.split(' ').next().is_some_and(|root| bad_roots.contains(root))
            };
            // Where preallocated space has checksums, `btrfs check` looks for an extent item at
            // each part of the extent, as if the part were an extent.
            let is_of_odd_csum = kind == NO_EXTENT_ITEM && before.kinds.contains_key(ODD_CSUM);
            let is_new = |one: &&String| {
                is_new(one) && !is_behind_bad(one) && !is_of_bad_root(one) && !is_of_odd_csum
            };
            let objects = objects.iter().filter(is_new);
            let objects: Vec<_> = objects.collect();
            let known = before.kinds.get(kind).map_or(0, BTreeSet::len);
            // A snapshot doubles the errors of its source.
            let allowed = if known == 0 { 0 } else { 4 * known + 8 };
            if objects.len() > allowed {
                let example = objects.first().map_or("", |object| object.as_str());
                let shown = format!("{kind} [{example}] ({known} before, {})", objects.len());
                new.insert(kind.clone(), shown);
            }
        }
        if self.is_broken && !before.is_broken {
            new.insert(NO_END.to_owned(), NO_END.to_owned());
        }
        new
    }
}

/// How `btrfs check` reports that a tree has another root than the extent tree knows.
const ROOTS: [&str; 3] =
    ["btree root extent for root", "has a root item with", "root item for root #"];

/// How `btrfs check` reports that free space and extents disagree.
const FREE_SPACE: [&str; 2] =
    ["still entries left in the space cache", "cache appears valid but isn't"];

const ROOT_ITEM: &str = "root item";
const NO_ROOT_DIR: &str = "root # root dir # not found";
const NO_TREE_BLOCK: &str = "tree extent[#, #] root # has no tree block found";

const BAD_EXTENT: &str = "root # inode #: bad file extent";
const OTHER_ADDRESS: &str =
    "data extent[#, #] bytenr mimsmatch, extent item bytenr # file item bytenr #";
const NO_EXTENT_ITEM: &str = "Missing extent item in extent tree for disk_bytenr #, num_bytes #";
pub(crate) const ODD_CSUM: &str = "root # inode #: odd csum item";
const NO_CSUM: &str = "root # inode #: some csum missing";

/// The complaint that stands for a `btrfs check` that was stopped.
pub(crate) const NO_END: &str = "it does not come to its end";

/// The logical address at the beginning of a complaint's numbers.
fn address(numbers: &str) -> Option<&str> {
    let first = numbers.split(' ').next()?;
    first.parse::<u64>().ok().filter(|&number| number >= 1 << 16).map(|_| first)
}

/// A line without names of files, which may be anything.
fn without_names(line: &str) -> String {
    match line.split_once(" name ") {
        Some((before, rest)) => {
            let behind = rest.find(" filetype ").map_or("", |at| &rest[at..]);
            format!("{before} name{behind}")
        }
        None => line.to_owned(),
    }
}

/// A line with each number replaced, and the numbers. Digits within words stay.
fn shape(line: &str) -> (String, String) {
    let (mut shape, mut numbers) = (String::new(), Vec::new());
    let mut word = String::new();
    let mut flush = |word: &mut String, shape: &mut String| {
        let is_hex = word.len() > 5 && word.chars().all(|c| c.is_ascii_hexdigit());
        let is_number =
            word.chars().all(|c| c.is_ascii_digit()) || word.starts_with("0x") || is_hex;
        if !word.is_empty() && is_number {
            shape.push('#');
            numbers.push(word.clone());
        } else {
            shape.push_str(word);
        }
        word.clear();
    };
    for c in line.chars() {
        if c.is_alphanumeric() {
            word.push(c);
        } else {
            flush(&mut word, &mut shape);
            shape.push(c);
        }
    }
    flush(&mut word, &mut shape);
    (shape, numbers.join(" "))
}
