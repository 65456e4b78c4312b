//! Sets the labels of a volume that is filled.

use offshoot_vfs::path::at_path;
use offshoot_vfs::walk::{DEPTH_MAX, WalkVisitor, WalkedFile, walk};
use offshoot_vfs::{Attr, Error, FileId, FileSystemMut, FileType, SafeName, Timestamp, XattrMode};

use super::FileContexts;
use crate::extract::{LinkName, LinkTable, Problems};
use crate::{Result, TransferFailure};

/// The attribute with the label.
const LABEL: &[u8] = b"security.selinux";

/// What a label takes in trees, about.
pub(in crate::build) const LABEL_BYTES: u64 = 64;

/// Gives every file of the volume the label that `contexts` has for its path. Files for which they
/// have none keep theirs. A file with several names gets the label of the first that is met.
pub(in crate::build) fn set_labels(
    fs: &dyn FileSystemMut,
    contexts: &FileContexts,
    problems: &Problems<'_>,
    at: Timestamp,
) -> Result {
    let mut labeller =
        Labeller { fs, contexts, problems, at, links: LinkTable::default(), failure: None };
    labeller.label(fs.root(), b"", FileType::Directory)?;
    walk(fs, fs.root(), (), DEPTH_MAX, &mut labeller);
    if problems.is_stopped() {
        return Err(TransferFailure::Interrupted);
    }
    labeller.failure.map_or(Ok(()), Err)
}

struct Labeller<'a> {
    fs: &'a dyn FileSystemMut,
    contexts: &'a FileContexts,
    problems: &'a Problems<'a>,
    at: Timestamp,
    /// The inodes with several names that have their labels.
    links: LinkTable,
    failure: Option<TransferFailure>,
}

impl Labeller<'_> {
    fn label(&self, file: FileId, path: &[u8], file_type: FileType) -> Result {
        let path = [b"/", path].concat();
        let Some(label) = self.contexts.label(&path, file_type) else { return Ok(()) };
        let set = self.fs.set_xattr(file, LABEL, label, XattrMode::Set, self.at);
        set.map_err(|error| at_path(error, &path).into())
    }

    /// Whether the file is one more name of a file that has its label.
    fn is_labelled(&mut self, attr: &Attr, parent: FileId, name: &SafeName) -> Result<bool> {
        if attr.nlink < 2 || attr.file_type == FileType::Directory {
            return Ok(false);
        }
        let failed = |error: std::io::Error| {
            TransferFailure::Host("the table of hard links".to_owned(), error)
        };
        if self.links.newest(attr).map_err(failed)?.is_some() {
            return Ok(true);
        }
        let name = LinkName { parent, name: name.clone() };
        self.links.add(attr, &name).map_err(failed)?;
        Ok(false)
    }

    fn take(&mut self, entry: &WalkedFile<'_>) {
        let done = match self.is_labelled(entry.attr, entry.parent, entry.name) {
            Ok(true) => Ok(()),
            Ok(false) => self.label(entry.attr.file, entry.path, entry.attr.file_type),
            Err(failure) => Err(failure),
        };
        self.failure = self.failure.take().or(done.err());
    }
}

impl WalkVisitor for Labeller<'_> {
    type Directory = ();

    fn enter(&mut self, (): &(), entry: &WalkedFile<'_>) -> Option<()> {
        self.take(entry);
        Some(())
    }

    fn visit(&mut self, (): &(), entry: &WalkedFile<'_>) {
        self.take(entry);
    }

    fn failed(&mut self, path: &[u8], error: &Error) {
        let what = offshoot_vfs::Nameless(error).to_string();
        let failure = crate::build::SourceProblem::Failed(what).at(path);
        self.failure = self.failure.take().or(Some(failure));
    }

    fn is_stopped(&self) -> bool {
        self.failure.is_some() || self.problems.is_stopped()
    }
}
