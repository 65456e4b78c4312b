//! The engine as the explorer sees it, and the volumes that it works on.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use offshoot_device::{BlockDevice, MemoryDevice};
use offshoot_testkit::crash::manners::EngineManners;
use offshoot_testkit::crash::{MemberDevices, OpenedVolume, TestedEngine};
use offshoot_testkit::model::ModelManners;
use offshoot_testkit::xfs::disk::XfsDisk;
use offshoot_testkit::xfs::judges::XfsJudges;
use offshoot_vfs::{Error, FileSystem, Result, Structure, Volume};
use offshoot_xfs::{XfsOptions, XfsReport, XfsReporter, XfsVolume, check_xfs};

/// The bytes of a part of a device that is copied at once.
const PART: usize = 64 << 10;

/// The kinds of volumes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct XfsShape {
    pub(crate) name: &'static str,
    /// Options of `mkfs.xfs`.
    pub(crate) mkfs: &'static str,
    pub(crate) mib: u64,
    /// Whether files can share blocks.
    pub(crate) has_sharing: bool,
    /// Whether inodes name their directories. Files that exchange names get another time then, and
    /// the model does not know that.
    pub(crate) has_parents: bool,
}

/// The manners of the format.
pub(crate) const XFS_MANNERS: EngineManners = EngineManners {
    model: ModelManners::Xfs,
    is_overwriting: true,
    is_ordered: true,
    ends_with_writes: true,
};

/// As `mkfs.xfs` makes them, but small.
pub(crate) const USUAL: XfsShape = XfsShape {
    name: "usual",
    mkfs: "--unsupported -m rmapbt=1,reflink=1",
    mib: 64,
    has_sharing: true,
    has_parents: false,
};

/// All shapes.
pub(crate) const SHAPES: [XfsShape; 5] = [
    USUAL,
    XfsShape {
        name: "parents",
        mkfs: "--unsupported -n parent=1 -i exchange=1,nrext64=1 -m rmapbt=1",
        has_parents: true,
        ..USUAL
    },
    XfsShape { name: "1k", mkfs: "--unsupported -b size=1024 -m rmapbt=0,reflink=1", ..USUAL },
    XfsShape {
        name: "no sharing",
        mkfs: "--unsupported -m rmapbt=0,reflink=0 -i sparse=0,nrext64=0",
        has_sharing: false,
        ..USUAL
    },
    XfsShape {
        name: "groups",
        mkfs: "--unsupported -d agcount=4 -m rmapbt=1 -s size=4096",
        mib: 160,
        ..USUAL
    },
];

/// An empty volume, and the engine that works on it.
pub(crate) struct XfsUnderTest {
    pub(crate) image: Arc<dyn BlockDevice>,
    pub(crate) engine: OurXfs,
}

impl XfsUnderTest {
    /// A new volume.
    pub(crate) fn new(judges: &XfsJudges, shape: XfsShape) -> Self {
        let disk = XfsDisk::create(judges, shape.mib);
        disk.mkfs(shape.mkfs);
        Self::of(&disk)
    }

    /// A volume whose log is at the end of its ring, so that the next changes go around it.
    pub(crate) fn near_the_end_of_the_log(judges: &XfsJudges, shape: XfsShape) -> Self {
        let disk = XfsDisk::create(judges, shape.mib);
        disk.mkfs(shape.mkfs);
        loop {
            let part = head_of_log(&disk);
            if part > 0.985 {
                return Self::of(&disk);
            }
            let files = if part < 0.9 { 500 } else { 20 };
            let mount = disk.mount("rw,noatime", &[]);
            let path = |number: i32| mount.path().join(number.to_string());
            for number in 0..files {
                std::fs::write(path(number), "").unwrap();
            }
            mount.sync();
            for number in 0..files {
                std::fs::remove_file(path(number)).unwrap();
            }
        }
    }

    /// A copy of the volume on a disk.
    pub(crate) fn of(disk: &XfsDisk) -> Self {
        let size = std::fs::metadata(disk.image()).unwrap().len();
        let image = Arc::new(MemoryDevice::sparse(size));
        copy(&*disk.device(), &*image);
        let volume = XfsVolume::open(image.clone(), &XfsOptions::default()).unwrap();
        let geometry = &volume.superblock().geometry;
        let start = geometry.place_of(geometry.log_start).unwrap().bytes();
        let log = start..start + (u64::from(geometry.log_blocks) << geometry.block_log);
        Self { image, engine: OurXfs { log } }
    }
}

/// How far the head of an empty log is on its ring, from 0 to 1.
fn head_of_log(disk: &XfsDisk) -> f64 {
    let volume = XfsVolume::open(disk.device(), &XfsOptions::default()).unwrap();
    let geometry = &volume.superblock().geometry;
    let blocks = u64::from(geometry.log_blocks) << geometry.block_log >> 9;
    let state = volume.version().state;
    let head = state.rsplit([':', ' ', '/']).next().and_then(|block| block.parse::<u32>().ok());
    let head = head.unwrap_or_else(|| panic!("no head of the log in {state:?}"));
    f64::from(head) / f64::from(u32::try_from(blocks).unwrap())
}

/// Copies everything that is not zeros to a new device.
pub(crate) fn copy(from: &dyn BlockDevice, to: &dyn BlockDevice) {
    let mut part = vec![0; PART];
    for at in (0..from.size_bytes()).step_by(PART) {
        from.read_at(at, &mut part).unwrap();
        if part.iter().any(|byte| *byte != 0) {
            to.write_at(at, &part).unwrap();
        }
    }
}

/// The engine under test. It makes nothing durable by the clock, so that every run is the same.
#[derive(Clone, Debug)]
pub(crate) struct OurXfs {
    /// The bytes of the log on the device.
    pub(crate) log: Range<u64>,
}

fn only(mut devices: MemberDevices) -> Arc<dyn BlockDevice> {
    devices.swap_remove(0)
}

fn opened(volume: &Arc<XfsVolume>) -> Result<OpenedVolume> {
    Ok(OpenedVolume::without_subvolumes(volume.clone().files(volume.root().dev)?))
}

impl TestedEngine for OurXfs {
    fn open(&self, devices: MemberDevices) -> Result<OpenedVolume> {
        opened(&XfsVolume::open(only(devices), &XfsOptions::default())?)
    }

    fn open_writable(&self, devices: MemberDevices) -> Result<OpenedVolume> {
        let survived = Arc::<AtomicUsize>::default();
        let count = survived.clone();
        let reporter: XfsReporter = Arc::new(move |report| {
            if matches!(report, XfsReport::WritingStopped { .. }) {
                count.fetch_add(1, Ordering::Relaxed);
            }
        });
        let reporter = Some(reporter);
        let options = XfsOptions { sync_interval: None, reporter, ..XfsOptions::default() };
        let volume = XfsVolume::open_writable(only(devices), &options)?;
        Ok(OpenedVolume { survived, ..opened(&volume)? })
    }

    fn check(&self, devices: MemberDevices) -> Result<()> {
        let found = check_xfs(&only(devices), &XfsOptions::default())?.findings;
        if found.is_empty() {
            return Ok(());
        }
        let texts: Vec<_> = found.iter().take(5).map(ToString::to_string).collect();
        Err(Error::corrupt(Structure::File, texts.join("; ")))
    }

    fn manners(&self) -> EngineManners {
        XFS_MANNERS
    }

    /// Neither we nor the kernel mend a block of metadata that is torn in its place.
    fn bears_torn(&self, offset: u64, data: &[u8]) -> bool {
        self.log.contains(&offset) || !is_logged(data)
    }
}

/// Whether bytes begin as a block that the log changes. Contents of files of the explorer do not.
fn is_logged(data: &[u8]) -> bool {
    const BLOCKS: [&[u8; 4]; 15] = [
        b"XFSB", b"XAGF", b"XAGI", b"XAFL", b"AB3B", b"AB3C", b"IAB3", b"FIB3", b"RMB3", b"R3FC",
        b"BMA3", b"XDB3", b"XDD3", b"XDF3", b"XSLM",
    ];
    /// Nodes and leaves of directories and attributes have it behind two links.
    const HASHED: [[u8; 2]; 4] = [[0x3e, 0xbe], [0x3d, 0xf1], [0x3d, 0xff], [0x3b, 0xee]];
    BLOCKS.iter().any(|magic| data.starts_with(*magic))
        || data.starts_with(b"IN")
        || data.get(8..10).is_some_and(|found| HASHED.iter().any(|magic| magic == found))
}
