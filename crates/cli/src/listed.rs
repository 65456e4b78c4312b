//! The entries of a directory as users see them: sorted, each with the attributes of its file.

use std::ops::ControlFlow;

use offshoot_vfs::{Attr, Code, Error, FileId, FileSystem, FileType, Result, Structure};

use offshoot_vfs::enter::{Entrance, attr_of, may_enter};

/// How many entries of one directory are kept in memory.
const ENTRIES_MAX: usize = 1_000_000;

/// An entry.
pub(crate) struct Listed {
    pub(crate) name: Vec<u8>,
    /// The attributes of the file, or the error of reading them.
    pub(crate) attr: Result<Attr>,
    /// The entry is a directory that a walk enters.
    pub(crate) is_entered: bool,
}

/// The entries of `directory`, and the error that ended the reading early, if any. The walk began
/// at `top`. Names that begin with a dot are left out, unless `is_all`.
pub(crate) fn listed(
    fs: &dyn FileSystem,
    top: FileId,
    directory: FileId,
    is_all: bool,
) -> (Vec<Listed>, Option<Error>) {
    let mut found: Vec<(Vec<u8>, FileId)> = Vec::new();
    let (mut last, mut wrong) = (0, None);
    let read = fs.read_dir(directory, 0, &mut |entry| {
        if entry.cookie <= last {
            let what = "its entries are not in ascending order";
            wrong = Some(Error::corrupt(Structure::Directory, what));
        } else if found.len() == ENTRIES_MAX {
            let what = format!("sorting a directory of more than {ENTRIES_MAX} entries");
            wrong = Some(Error::unsupported(Code::Unsupported, what));
        }
        if wrong.is_some() {
            return ControlFlow::Break(());
        }
        last = entry.cookie;
        if is_all || !entry.name.starts_with(b".") {
            found.push((entry.name.to_vec(), entry.file));
        }
        ControlFlow::Continue(())
    });
    found.sort();
    let entry = |(name, file): (Vec<u8>, FileId)| {
        let mut attr = attr_of(fs, &name, file);
        let is_directory = attr.as_ref().is_ok_and(|attr| attr.file_type == FileType::Directory);
        let mut is_entered = false;
        if is_directory {
            match may_enter(fs, top, directory, &name, file) {
                Ok(entrance) => is_entered = entrance == Entrance::Walk,
                Err(error) => attr = Err(error),
            }
        }
        Listed { name, attr, is_entered }
    };
    (found.into_iter().map(entry).collect(), read.err().or(wrong))
}
