//! Filesystems that show the files of another one.

/// Methods of [`FileSystem`](crate::FileSystem) for what a file holds: each asks the filesystem in
/// the field `$inner`. They stand in the `impl` of a filesystem that changes what else there is:
/// which names a directory has, what is held, what may be changed.
#[macro_export]
macro_rules! forward_contents {
    ($inner:tt) => {
        fn read_link(&self, file: $crate::FileId) -> $crate::Result<Vec<u8>> {
            self.$inner.read_link(file)
        }

        fn xattr(&self, file: $crate::FileId, name: &[u8]) -> $crate::Result<Vec<u8>> {
            self.$inner.xattr(file, name)
        }

        fn read(&self, file: $crate::FileId, offset: u64, buf: &mut [u8]) -> $crate::Result<usize> {
            self.$inner.read(file, offset, buf)
        }

        fn read_data(
            &self,
            file: $crate::FileId,
            range: ::std::ops::Range<u64>,
            visit: &mut dyn FnMut(u64, &[u8]) -> $crate::Result<()>,
        ) -> $crate::Result<()> {
            self.$inner.read_data(file, range, visit)
        }

        fn next_data(
            &self,
            file: $crate::FileId,
            offset: u64,
        ) -> $crate::Result<Option<::std::ops::Range<u64>>> {
            self.$inner.next_data(file, offset)
        }

        fn prefetch(&self, files: &[$crate::FileId]) {
            self.$inner.prefetch(files);
        }
    };
}
