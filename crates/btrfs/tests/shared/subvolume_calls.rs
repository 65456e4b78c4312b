//! The engine's calls for subvolumes, in the form that the model has.

use offshoot_btrfs::{BtrfsVolume, Filesystem, SubvolumeId};
use offshoot_btrfs_format::TreeId;
use offshoot_testkit::model::subvolumes::{Settings, SubvolumeCalls};
use offshoot_vfs::{EntryPlace, FileId, FileSystem, NewFile, Result, Timestamp};

pub(crate) struct OurSubvolumes {
    pub(crate) fs: Filesystem,
    /// What is called when deleted subvolumes were dropped.
    when_dropped: fn(&BtrfsVolume) -> Result<()>,
}

impl OurSubvolumes {
    pub(crate) fn new(fs: Filesystem) -> Self {
        Self::calling(fs, |_| Ok(()))
    }

    /// The same, which calls `when_dropped` when deleted subvolumes were dropped.
    pub(crate) fn calling(fs: Filesystem, when_dropped: fn(&BtrfsVolume) -> Result<()>) -> Self {
        Self { fs, when_dropped }
    }
}

impl SubvolumeCalls for OurSubvolumes {
    fn create_subvolume(&self, place: EntryPlace<'_>, new: &NewFile) -> Result<FileId> {
        self.fs.create_subvolume(place, new).map(root_of)
    }

    fn snapshot(
        &self,
        source: FileId,
        place: EntryPlace<'_>,
        is_read_only: bool,
        at: Timestamp,
    ) -> Result<FileId> {
        self.fs.snapshot(subvolume_of(source), place, is_read_only, at).map(root_of)
    }

    fn delete_subvolume(&self, place: EntryPlace<'_>, at: Timestamp) -> Result<()> {
        self.fs.delete_subvolume(place, at)
    }

    fn drop_deleted(&self) -> Result<()> {
        self.fs.volume().drop_deleted()?;
        (self.when_dropped)(self.fs.volume())
    }

    fn set_read_only(&self, root: FileId, is_read_only: bool) -> Result<()> {
        // The engine stores the time only for received subvolumes, and there are none here.
        self.fs.volume().set_read_only(subvolume_of(root), is_read_only, Timestamp::default())
    }

    fn set_default(&self, root: FileId) -> Result<()> {
        self.fs.volume().set_default_subvolume(subvolume_of(root))
    }

    fn settings(&self, file: FileId) -> Result<Option<Settings>> {
        if file.dev == self.fs.root().dev || file != root_of(subvolume_of(file)) {
            return Ok(None);
        }
        let subvolume = self.fs.volume().subvolume(subvolume_of(file))?;
        let is_default = self.fs.volume().default_subvolume()? == subvolume.id;
        Ok(Some(Settings { is_read_only: subvolume.is_read_only, is_default }))
    }

    fn default(&self) -> Result<FileId> {
        self.fs.volume().default_subvolume().map(root_of)
    }

    fn made(&self, file: FileId) -> Result<Timestamp> {
        if file.dev == self.fs.root().dev {
            return Ok(Timestamp::default());
        }
        self.fs.volume().subvolume(subvolume_of(file)).map(|subvolume| subvolume.created)
    }
}

fn subvolume_of(file: FileId) -> SubvolumeId {
    TreeId(file.dev)
}

fn root_of(id: SubvolumeId) -> FileId {
    FileId { dev: id.0, ino: 256 }
}
